"""Freeing in the middle of a prompt, for the Free Memory node."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import psutil
from comfy import memory_management

from ...devices.caches import trim_heap
from ...lifecycle.absent import NoFreeFlow
from ...lifecycle.policy import Standing
from ...telemetry.recorder import Recorder
from ...units import format_bytes
from .free_flow import FreeFlow

log = logging.getLogger("multigpu")


def free_now(
    flow: FreeFlow | NoFreeFlow, recorder: Recorder, what: str, leave: Callable[[Standing], bool] | None
) -> None:
    """Unload the models for whose standing `leave` is true; with None drop cached outputs instead. `what` is logged."""
    unloaded = []
    if leave is not None:
        unloaded = flow.unload_now(leave)
    elif memory_management.extra_ram_release_callback is not None:
        memory_management.extra_ram_release(2 * psutil.virtual_memory().total, free_active=True)
    else:
        log.warning(
            "[MultiGPU] Free Memory: ComfyUI's cache cannot be emptied while a prompt runs; start ComfyUI without "
            "--cache-classic, --cache-lru and --cache-none, or free memory after the prompt"
        )
    gc.collect()
    freed = format_bytes(sum(flow.clear_caches().values()))
    trim_heap()
    names = ", ".join(unloaded) or "no model"
    log.info("[MultiGPU] Free Memory, %s: %s unloaded, %s of device caches given back", what, names, freed)
    recorder.take("Free Memory", what)
