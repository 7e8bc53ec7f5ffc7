"""A real ComfyUI process: started in a base folder of its own, waited for, restarted, stopped, never left behind."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .client import Client, RequestFailed
from .guard import Guarded
from .problem import Problem
from .steps import remove

BASE_FOLDERS = ("custom_nodes", "models", "input", "output", "temp", "user/default")
MODEL_KINDS = ("checkpoints", "controlnet", "diffusion_models", "loras", "text_encoders", "vae")
PORT_TAKEN = re.compile(r"address already in use|error while attempting to bind|only one usage of each socket", re.I)


@dataclass(frozen=True)
class ServerSpec:
    """What to start.

    `packs` are linked into `custom_nodes`, keyed by folder name. `first_packs` is a folder of packs that ComfyUI loads
    before any of them, `last_packs` one of packs that it loads after them. `settings` are saved as if somebody had
    chosen them in ComfyUI's dialog. `runner` is put between the interpreter and `main.py`: a script that prepares the
    process and then runs its arguments. Without `port` a free one is found.
    """

    tree: Path
    python: Path
    base: Path
    models: Path
    packs: Mapping[str, Path] = field(default_factory=dict)
    first_packs: Path | None = None
    last_packs: Path | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    runner: tuple[str, ...] = ()
    frontend: Path | None = None
    port: int | None = None


class Server:
    """Start with `with Server(spec) as server:` or `start()` and `stop()`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.log_path = spec.base / "comfyui.log"
        self.client = Client("")
        self._child: Guarded | None = None
        self._log_from = 0

    def log(self) -> str:
        """Everything logged since the last start."""
        return self.log_path.read_bytes()[self._log_from :].decode(errors="replace")

    def start(self, timeout: float = 180.0) -> "Server":
        """Returns when ComfyUI answers. Raises Problem if it ends or stays silent, and if `port` is taken."""
        assert self._child is None, "already started"
        prepare_base(self.spec)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.spec.environment}
        for last in (False, False, True):
            port = usable_port(self.spec.port)
            self.client = Client(f"http://127.0.0.1:{port}")
            self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._child = Guarded(self._command(port), cwd=self.spec.tree, env=environment, log=self.log_path)
            try:
                self._wait(timeout)
                break
            except BaseException:
                self.stop()
                if last or self.spec.port or not PORT_TAKEN.search(self.log()):
                    raise  # else: someone took the free port in between
        return self

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def restart(self, timeout: float = 180.0) -> None:
        self.stop()
        self.start(timeout)

    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, port: int) -> list[str | Path]:
        spec = self.spec
        command: list[str | Path] = [spec.python, *spec.runner, spec.tree / "main.py"]
        command += ["--listen", "127.0.0.1", "--port", str(port), "--base-directory", spec.base]
        command += ["--database-url", f"sqlite:///{spec.base.as_posix()}/user/comfyui.db"]
        command += ["--extra-model-paths-config", spec.base / "extra_paths.yaml"]
        command += ["--front-end-root", spec.frontend] if spec.frontend else []
        return [*command, "--disable-api-nodes", "--disable-auto-launch", *spec.flags]

    def _wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.running() and time.monotonic() < end:
            with contextlib.suppress(OSError, RequestFailed):
                if str(self.spec.base) in self.client.get("/system_stats")["system"]["argv"]:
                    return  # else: another server has taken the port in between, and answers
            time.sleep(0.1)
        failure = f"did not answer within {timeout:.0f} s" if self.running() else "ended while it started"
        fix = f"fix what its log, {self.log_path}, reports and run the same command again"
        raise Problem("\n".join([*self.log().splitlines()[-15:], f"ComfyUI {failure}; {fix}."]))


def usable_port(wanted: int | None) -> int:
    """The port if it is free, or any free one if none is wanted. Raises Problem when it is taken or not allowed."""
    with socket.socket() as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError):
            fix = "choose another with --port, or leave it out"
            raise Problem(f"Port {wanted} is taken or not allowed; {fix}.") from None
        return int(probe.getsockname()[1])


def prepare_base(spec: ServerSpec) -> None:
    """Make the base folder: links to the packs, and the paths of the models."""
    for name in BASE_FOLDERS:
        (spec.base / name).mkdir(parents=True, exist_ok=True)
    for present in (spec.base / "custom_nodes").iterdir():
        remove(present)
    for name, target in spec.packs.items():
        link = spec.base / "custom_nodes" / name
        if sys.platform == "win32":  # a junction needs no rights that a link would
            import _winapi

            _winapi.CreateJunction(str(target.resolve()), str(link))
        else:
            os.symlink(target.resolve(), link)
    paths: dict[str, dict[str, object]] = {"models": {"base_path": str(spec.models), **{k: k for k in MODEL_KINDS}}}
    if spec.first_packs is not None:
        paths["first_packs"] = {"is_default": True, "custom_nodes": str(spec.first_packs)}
    if spec.last_packs is not None:
        paths["last_packs"] = {"custom_nodes": str(spec.last_packs)}
    (spec.base / "extra_paths.yaml").write_text(json.dumps(paths, indent=1), encoding="utf-8")  # JSON is YAML
    settings = {"Comfy.TutorialCompleted": True, **spec.settings}
    (spec.base / "user" / "default" / "comfy.settings.json").write_text(json.dumps(settings) + "\n")
