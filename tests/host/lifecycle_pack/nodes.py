"""Nodes that run out of memory, or wait until they are told to go on."""

from __future__ import annotations

import threading
from typing import Any

import torch

GATE = threading.Event()
WAITING = threading.Event()


class PassesAnything:
    """A node with one input and one output of any type."""

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True


class Exhaust(PassesAnything):
    """Raises what torch raises when a device is full, after its input is there."""

    def run(self, value: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")


class Wait(PassesAnything):
    """Passes its input on once the test opens the gate."""

    def run(self, value: Any) -> tuple[Any]:
        WAITING.set()
        if not GATE.wait(60):
            raise TimeoutError("nobody opened the gate")
        return (value,)


class Conditioning:
    """What a text encoder would have made of an empty text, in the shapes that Flux takes."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def run(self) -> tuple[Any]:
        return ([[torch.zeros(1, 77, 4096), {"pooled_output": torch.zeros(1, 2048)}]],)


NODE_CLASS_MAPPINGS = {"TestExhaust": Exhaust, "TestWait": Wait, "TestConditioning": Conditioning}
