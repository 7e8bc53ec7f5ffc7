"""Talking to a running ComfyUI over HTTP: prompts, history, images, memory."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

Workflow = dict[str, dict[str, Any]]
"""A workflow in ComfyUI's API form: node id -> class_type and inputs."""


class RequestFailed(Exception):
    """ComfyUI answered with an error; the message has the status and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class PromptFailed(Exception):
    """A prompt ran and ended with an error; `details` is ComfyUI's own account of it."""

    def __init__(self, details: dict[str, Any]) -> None:
        where = f"{details.get('node_type')} (node {details.get('node_id')})"
        super().__init__(f"{where}: {details.get('exception_type')}: {details.get('exception_message', '').strip()}")
        self.details = details


@dataclass(frozen=True)
class Finished:
    """A prompt that succeeded."""

    prompt_id: str
    history: dict[str, Any]
    images: tuple[bytes, ...]
    seconds: float

    @property
    def cached_nodes(self) -> frozenset[str]:
        """Ids of the nodes whose outputs came from the executor's cache."""
        for kind, data in self.history["status"]["messages"]:
            if kind == "execution_cached":
                return frozenset(data["nodes"])
        return frozenset()


class Client:
    """One ComfyUI server at `address`, such as `http://127.0.0.1:8188`."""

    def __init__(self, address: str, timeout: float = 60.0) -> None:
        self.address = address
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy

    def raw(self, path: str, body: Any = None, method: str | None = None) -> bytes:
        """GET, or POST `body` as JSON. Raises RequestFailed on an error status, OSError when there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data=data, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise RequestFailed(error.code, error.read().decode(errors="replace")) from None

    def get(self, path: str, **query: str | int) -> Any:
        return json.loads(self.raw(path + ("?" + urllib.parse.urlencode(query) if query else "")))

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
            return Finished(prompt_id, history, self._images(history), time.monotonic() - started)
        raise TimeoutError(f"prompt {prompt_id} did not end within {timeout:.0f} s")

    def run(self, workflow: Workflow, timeout: float = 300.0, **more: Any) -> Finished:
        return self.finish(self.submit(workflow, **more), timeout)

    def free(self, *, unload_models: bool = False, free_memory: bool = False) -> None:
        """What ComfyUI's two buttons do. Returns at once; the worker acts when it is idle."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def _images(self, history: dict[str, Any]) -> tuple[bytes, ...]:
        """Node by node in the order of their ids, as files."""
        files = []
        for _, output in sorted(history["outputs"].items()):
            for image in output.get("images", ()):
                query = {key: image[key] for key in ("filename", "subfolder", "type")}
                files.append(self.raw("/view?" + urllib.parse.urlencode(query)))
        return tuple(files)
