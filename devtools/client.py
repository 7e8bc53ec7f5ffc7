"""Talking to a running ComfyUI over HTTP: prompts, history, images, memory."""

import json
import time
from dataclasses import dataclass
from typing import Any

import requests

Workflow = dict[str, dict[str, Any]]
"""A workflow in ComfyUI's API form: node id -> class_type and inputs."""


class RequestFailed(Exception):
    """ComfyUI answered with an error; the message has the status and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class PromptFailed(Exception):
    """A prompt ran and ended with an error; `details` is ComfyUI's own account of it."""

    def __init__(self, details: dict[str, Any]) -> None:
        where = f"{details.get('node_type')} (node {details.get('node_id')})"
        super().__init__(f"{where}: {details.get('exception_type')}: {details.get('exception_message', '').strip()}")
        self.details = details


@dataclass(frozen=True)
class Finished:
    """A prompt that succeeded."""

    history: dict[str, Any]
    images: tuple[bytes, ...]
    seconds: float

    @property
    def cached_nodes(self) -> frozenset[str]:
        """Ids of the nodes whose outputs came from the executor's cache."""
        return frozenset(dict(self.history["status"]["messages"]).get("execution_cached", {}).get("nodes", ()))


class Client:
    """One ComfyUI server at `address`, such as `http://127.0.0.1:8188`."""

    def __init__(self, address: str, timeout: float = 60.0) -> None:
        self.address = address
        self._timeout = timeout

    def raw(self, path: str, body: Any = None, **query: str | int) -> bytes:
        """GET, or POST `body` as JSON. Raises RequestFailed on an error status, OSError when there is no answer."""
        with requests.Session() as session:
            session.trust_env = False  # no proxy on the way to this machine
            method, address = "GET" if body is None else "POST", self.address + path
            answer = session.request(method, address, json=body, params=query, timeout=self._timeout)
        if not answer.ok:
            raise RequestFailed(answer.status_code, answer.content.decode(errors="replace"))
        return answer.content

    def get(self, path: str, **query: str | int) -> Any:
        return json.loads(self.raw(path, **query))

    def post(self, path: str, body: Any) -> Any:
        """POST JSON; the answer's JSON, or None when it has no body."""
        answer = self.raw(path, body)
        return json.loads(answer) if answer else None

    def submit(self, workflow: Workflow, **more: Any) -> str:
        """Queue a prompt and return its id. Raises RequestFailed when ComfyUI does not accept it.

        `more` is what else is sent with it, such as another `client_id`.
        """
        return str(self.post("/prompt", {"prompt": workflow, "client_id": "multigpu-dev", **more})["prompt_id"])

    def finish(self, prompt_id: str, timeout: float = 300.0) -> Finished:
        """Wait for a prompt. Raises PromptFailed when it ends with an error, TimeoutError when it does not end."""
        started = time.monotonic()
        while time.monotonic() - started < timeout:
            history = self.get(f"/history/{prompt_id}").get(prompt_id)
            if history is None:
                time.sleep(0.05)
                continue
            for kind, data in history["status"]["messages"]:
                if kind == "execution_error":
                    raise PromptFailed(data)
            return Finished(history, self._images(history), time.monotonic() - started)
        raise TimeoutError(f"prompt {prompt_id} did not end within {timeout:.0f} s")

    def run(self, workflow: Workflow, timeout: float = 300.0, **more: Any) -> Finished:
        return self.finish(self.submit(workflow, **more), timeout)

    def free(self, *, unload_models: bool = False, free_memory: bool = False) -> None:
        """What ComfyUI's two buttons do. Returns at once; the worker acts when it is idle."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def _images(self, history: dict[str, Any]) -> tuple[bytes, ...]:
        """Node by node in the order of their ids, as files."""
        images = [image for _, output in sorted(history["outputs"].items()) for image in output.get("images", ())]
        wanted = ("filename", "subfolder", "type")
        return tuple(self.raw("/view", **{key: image[key] for key in wanted}) for image in images)
