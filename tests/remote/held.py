"""A worker's real service that stops in one call, so that a test can kill something meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from multigpu.host.remote.boot import boot
from multigpu.remote.link import Message

HOLD = "MULTIGPU_TEST_HOLD"
"""The variable that names a file. While there is one, the call whose name is in it is not answered."""


def start(comfyui: Path, arguments: Sequence[str]) -> HeldService:
    return HeldService(boot(comfyui, arguments), Hold())


class Hold:
    """Which call is held, as the test says, and whether one is, as the worker says."""

    def __init__(self) -> None:
        self._asked = Path(os.environ[HOLD])
        self._held = self._asked.with_suffix(".held")

    def ask(self, method: str) -> None:
        """The next call of this name is held."""
        self._held.unlink(missing_ok=True)
        self._asked.write_text(method, encoding="utf-8")

    def release(self) -> None:
        """No call is held from now on."""
        self._asked.unlink(missing_ok=True)

    def wants(self, method: str) -> bool:
        return self._asked.exists() and self._asked.read_text(encoding="utf-8") == method

    def reached(self) -> bool:
        return self._held.exists()

    def here(self) -> None:
        """The call has come. Never returns."""
        self._held.touch()
        threading.Event().wait()


class HeldService:
    def __init__(self, service: Any, hold: Hold) -> None:
        self._service = service
        self._hold = hold

    def serve(self, method: str, message: Message, caller: str = "") -> Message:
        if self._hold.wants(method):
            self._hold.here()
        answer: Message = self._service.serve(method, message, caller)
        return answer

    def versions(self) -> dict[str, str]:
        return dict(self._service.versions())

    def forget(self, callers: Collection[str]) -> None:
        self._service.forget(callers)

    def interrupt(self) -> None:
        self._service.interrupt()
