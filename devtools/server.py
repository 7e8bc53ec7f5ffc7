"""A real ComfyUI process: started in a base folder of its own, waited for, restarted, stopped, never left behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .client import Client, RequestFailed
from .guard import Guarded
from .problem import Problem
from .steps import remove, write_text

BASE_FOLDERS = ("custom_nodes", "models", "input", "output", "temp", "user/default")
MODEL_KINDS = ("checkpoints", "controlnet", "diffusion_models", "loras", "text_encoders", "vae")
PORT_TAKEN = re.compile(r"address already in use|error while attempting to bind|only one usage of each socket", re.I)


class ServerFailed(Exception):
    """ComfyUI did not come up; the message ends with what it logged last."""


@dataclass(frozen=True)
class ServerSpec:
    """What to start.

    `packs` are linked into `custom_nodes`, keyed by folder name. `first_packs` is a folder of packs that ComfyUI loads
    before any of them. `runner` is put between the interpreter and `main.py`: a script that prepares the process and
    then runs its arguments. Without `port` a free one is found.
    """

    tree: Path
    python: Path
    base: Path
    models: Path
    packs: Mapping[str, Path] = field(default_factory=dict)
    first_packs: Path | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    runner: tuple[str, ...] = ()
    frontend: Path | None = None
    port: int | None = None


class Server:
    """Start with `with Server(spec) as server:` or `start()` and `stop()`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.log_path = spec.base / "comfyui.log"
        self.port = 0
        self._child: Guarded | None = None
        self._log_from = 0

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}")

    def log(self) -> str:
        """Everything logged since the last start."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def start(self, timeout: float = 180.0) -> Server:
        """Returns when ComfyUI answers. Raises ServerFailed if it ends or stays silent, Problem if `port` is taken."""
        assert self._child is None, "already started"
        _prepare_base(self.spec)
        for attempt in range(3):
            self.port = self.spec.port or free_port()
            if self.spec.port:
                check_port(self.spec.port)
            self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._child = Guarded(self._command(), cwd=self.spec.tree, env=self._environment(), log=self.log_path)
            try:
                self._wait(timeout)
            except BaseException:
                self.stop()
                if attempt < 2 and not self.spec.port and PORT_TAKEN.search(self.log()):
                    continue  # someone took the free port in between
                raise
            break
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

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self) -> list[str | Path]:
        spec = self.spec
        command: list[str | Path] = [spec.python, *spec.runner, spec.tree / "main.py"]
        command += ["--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", spec.base]
        command += ["--database-url", f"sqlite:///{spec.base.as_posix()}/user/comfyui.db"]
        command += ["--extra-model-paths-config", spec.base / "extra_paths.yaml"]
        if spec.frontend is not None:
            command += ["--front-end-root", spec.frontend]
        return [*command, "--disable-api-nodes", "--disable-auto-launch", *spec.flags]

    def _environment(self) -> dict[str, str]:
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | quiet | dict(self.spec.environment)

    def _wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        client = Client(f"http://127.0.0.1:{self.port}", timeout=5.0)
        while time.monotonic() < end:
            if not self.running():
                raise ServerFailed(f"ComfyUI ended while it started; its log ends with:\n{_tail(self.log())}")
            try:
                client.get("/system_stats")
                return
            except (OSError, RequestFailed):
                time.sleep(0.1)
        raise ServerFailed(f"ComfyUI did not answer within {timeout:.0f} s; its log ends with:\n{_tail(self.log())}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    with socket.socket() as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            raise Problem(
                f"Port {port} is taken or not allowed; choose another with --port, or leave it out."
            ) from None


def _prepare_base(spec: ServerSpec) -> None:
    for name in BASE_FOLDERS:
        (spec.base / name).mkdir(parents=True, exist_ok=True)
    wanted = {spec.base / "custom_nodes" / name: target.resolve() for name, target in spec.packs.items()}
    for present in (spec.base / "custom_nodes").iterdir():
        if present not in wanted or present.resolve() != wanted[present]:
            remove(present)
    for link, target in wanted.items():
        if not link.exists():
            _link(link, target)
    paths: dict[str, dict[str, object]] = {
        "models": {"base_path": str(spec.models), **{kind: kind for kind in MODEL_KINDS}}
    }
    if spec.first_packs is not None:
        paths["first_packs"] = {"is_default": True, "custom_nodes": str(spec.first_packs)}
    write_text(spec.base / "extra_paths.yaml", json.dumps(paths, indent=1))  # JSON is YAML
    write_text(spec.base / "user" / "default" / "comfy.settings.json", '{"Comfy.TutorialCompleted": true}\n')


def _link(link: Path, target: Path) -> None:
    if os.name == "nt":  # a junction needs no rights that a link would
        subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(target)], check=True, capture_output=True)
    else:
        link.symlink_to(target, target_is_directory=True)


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-lines:])
