"""Freeing in the middle of a prompt, for the Free Memory node."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

import psutil
from comfy import memory_management

from ...devices.caches import trim_heap
from ...lifecycle.absent import NoFreeFlow
from ...lifecycle.policy import Standing
from ...telemetry.frees import Fate, Freed
from ...telemetry.recorder import Recorder
from ..loaded_models import entries, standing
from ..model_files import names_of
from .free_flow import FreeFlow

log = logging.getLogger("multigpu")

NAME = "Free Memory"
SET = {Standing.EJECT: "set to eject", Standing.KEEP: "set to keep"}
"""Reasons why a model left or stayed; for models without a choice they depend on what was asked for."""


def free_now(
    flow: FreeFlow | NoFreeFlow, recorder: Recorder, what: str, leave: Callable[[Standing], bool] | None
) -> None:
    """Unload the models for whose standing `leave` is true; with None drop cached outputs instead. `what` is logged."""
    before = flow.reserved()
    patchers = [entry.model for entry in entries()]
    names, said = names_of(patchers), {id(patcher.model): standing(patcher.model) for patcher in patchers}
    del patchers  # they must not outlive what is dropped here
    if leave is not None:
        flow.unload_now(leave)
    elif memory_management.extra_ram_release_callback is not None:
        memory_management.extra_ram_release(2 * psutil.virtual_memory().total, free_active=True)
    else:
        log.warning(
            "[MultiGPU] Free Memory: ComfyUI's cache cannot be emptied while a prompt runs; start ComfyUI without "
            "--cache-classic, --cache-lru and --cache-none, or free memory after the prompt"
        )
    gc.collect()
    there = {id(entry.model.model) for entry in entries()}
    gone, stays = "not set to keep", "not set to eject"
    if leave is None:
        gone, stays = "no node needs it any more", "still in use"
    left = [Fate(name, SET.get(said[its], gone)) for its, name in names.items() if its not in there]
    stay = [Fate(name, SET.get(said[its], stays)) for its, name in names.items() if its in there]
    freed = Freed(time.time(), leave is None, tuple(left), tuple(stay))
    log.info("[MultiGPU] %s, %s: %s", NAME, what, freed.words())
    flow.clear_caches(NAME, before)
    trim_heap()
    recorder.take(NAME, what)
