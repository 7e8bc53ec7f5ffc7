"""The only place that assigns into the host's modules, and always for the length of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_patcher
from comfy import model_management


@contextmanager
def static_patchers() -> Iterator[None]:
    """Loaders called inside make static patchers, also those that offer no argument for it (VAE, ControlNet)."""
    before = comfy.model_patcher.CoreModelPatcher
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcher
    try:
        yield
    finally:
        comfy.model_patcher.CoreModelPatcher = before


def replaced_default_device(answer: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let `answer`, which is given the original, say what the host's default device is. Returns what undoes it."""
    original = model_management.get_torch_device

    def get_torch_device() -> Any:
        return answer(original)

    def undo() -> None:
        if model_management.get_torch_device is get_torch_device:
            model_management.get_torch_device = original

    model_management.get_torch_device = get_torch_device
    return undo
