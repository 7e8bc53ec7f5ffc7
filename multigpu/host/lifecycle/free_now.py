"""Freeing in the middle of a prompt, for the Free Memory node."""

from __future__ import annotations

import gc
import logging

import psutil
from comfy import memory_management

from ...devices.caches import trim_heap
from ...lifecycle.absent import NoFreeFlow
from ...lifecycle.policy import Standing
from ...telemetry.recorder import Recorder
from ...units import format_bytes
from .free_flow import FreeFlow

log = logging.getLogger("multigpu")


def unload_flagged(flow: FreeFlow | NoFreeFlow, recorder: Recorder) -> None:
    """Unload the models that are to leave at the next free."""
    _finish(flow, recorder, "flagged models", flow.unload_now(lambda its: its is Standing.EJECT))


def unload_all_but_pinned(flow: FreeFlow | NoFreeFlow, recorder: Recorder) -> None:
    """Unload every model that the user did not pin."""
    _finish(flow, recorder, "all but pinned", flow.unload_now(lambda its: its is not Standing.KEEP))


def free_ram_caches(flow: FreeFlow | NoFreeFlow, recorder: Recorder) -> None:
    """Drop the cached outputs that no waiting node of this prompt needs.

    Only the host's default cache can do that while a prompt runs; with another one a warning says so.
    """
    if memory_management.extra_ram_release_callback is None:
        log.warning(
            "[MultiGPU] Free Memory: ComfyUI's cache cannot be emptied while a prompt runs; start ComfyUI without "
            "--cache-classic, --cache-lru and --cache-none, or free memory after the prompt"
        )
    else:
        memory_management.extra_ram_release(2 * psutil.virtual_memory().total, free_active=True)
    _finish(flow, recorder, "RAM caches", [])


def _finish(flow: FreeFlow | NoFreeFlow, recorder: Recorder, what: str, unloaded: list[str]) -> None:
    gc.collect()
    freed = sum(flow.clear_caches().values())
    trim_heap()
    names = ", ".join(unloaded) or "no model"
    log.info(
        "[MultiGPU] Free Memory, %s: %s unloaded, %s of device caches given back", what, names, format_bytes(freed)
    )
    recorder.take("Free Memory", what)
