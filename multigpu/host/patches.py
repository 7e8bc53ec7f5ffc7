"""The only place that assigns into the host's modules, and always for the length of a `with`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_patcher


@contextmanager
def static_patchers() -> Iterator[None]:
    """Loaders called inside make static patchers, also those that offer no argument for it (VAE, ControlNet)."""
    before = comfy.model_patcher.CoreModelPatcher
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcher
    try:
        yield
    finally:
        comfy.model_patcher.CoreModelPatcher = before
