"""A service without ComfyUI, for tests of the way to it and back."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from multigpu import __version__
from multigpu.remote.codec import pack, unpack
from multigpu.remote.link import Message


def start(comfyui: Path, arguments: Sequence[str]) -> Echo:
    """Looks for no ComfyUI."""
    return Echo()


class Echo:
    """Gives back what it is sent, as bytes or as a value; or something else.

    Which is its process, an error, nothing until it is interrupted, or a picture after a while.
    """

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def serve(self, method: str, message: Message, caller: str = "") -> Message:
        if method == "process":
            return Message(str(os.getpid()).encode())
        if method == "fail":
            raise ValueError(message.header.decode())
        if method == "wait":
            self._interrupted.clear()
            if not self._interrupted.wait(60):
                raise TimeoutError("nobody interrupted")
            return Message(b"interrupted")
        if method == "value":
            return pack(unpack(message))
        if method == "draw":
            self._interrupted.wait(float(message.header))
            return Message(b"", [bytes(3 * 512 * 512 * 4)])
        return message

    def versions(self) -> dict[str, str]:
        return {"MultiGPU": __version__, "torch": torch.__version__}

    def forget(self, callers: Collection[str]) -> None:
        """It keeps nothing."""

    def interrupt(self) -> None:
        self._interrupted.set()
