"""Nodes that run out of memory, or wait until they are told to go on."""

from __future__ import annotations

import threading
from typing import Any

import torch

GATE = threading.Event()
WAITING = threading.Event()


class Exhaust:
    """Raises what torch raises when a device is full, after its input is there."""

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    def run(self, value: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")


class Wait:
    """Passes its input on once the test opens the gate."""

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    def run(self, value: Any) -> tuple[Any]:
        WAITING.set()
        if not GATE.wait(60):
            raise TimeoutError("nobody opened the gate")
        return (value,)


NODE_CLASS_MAPPINGS = {"TestExhaust": Exhaust, "TestWait": Wait}
