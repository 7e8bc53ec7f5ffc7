"""Nodes for `check_gguf.py`: conditions without a text encoder, and conditions that show in a picture as a whole."""

from __future__ import annotations

from typing import Any

import torch


class Conditions:
    """As from a text encoder, in the shapes that Flux takes."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def run(self) -> tuple[Any]:
        made = torch.Generator().manual_seed(1)
        pooled = torch.randn(1, 2048, generator=made)
        return ([[torch.randn(1, 77, 4096, generator=made), {"pooled_output": pooled}]],)


class EveryCondition:
    """Adds the means of what HiDream's Llama returns, which Flux has no use for, to what Flux attends to."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",)}}

    def run(self, conditioning: Any) -> tuple[Any]:
        return ([[text + more["conditioning_llama3"].mean((1, 2)), more] for text, more in conditioning],)


NODE_CLASS_MAPPINGS = {"TestConditions": Conditions, "TestEveryCondition": EveryCondition}
