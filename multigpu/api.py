"""Functions for other packs and for our own nodes: which models stay loaded, freeing memory, and reporting it.

Other packs import them from `comfyui_multigpu`, inside the functions that use them: packs are loaded in no fixed order,
and without this pack the import raises ImportError. They work inside ComfyUI only. Where a function of ComfyUI that
they need differs from what we expect, `set_keep_loaded` does nothing, `load_once` always loads, those that only look at
memory work, and the others raise HostIncompatible. The attribute `_mgpu_unload_distorch_model` on an inner model may be
read and set by anyone: True is eject, False is keep; without it ComfyUI's own rules apply. It has an effect once a
model was placed, or `set_keep_loaded` or `add_retention_anchor` was called, which our nodes do when they are told to
keep or eject something.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .lifecycle.policy import FLAG, Standing
from .runtime import current
from .telemetry.snapshot import Snapshot

__all__ = [
    "FLAG", "add_retention_anchor", "clear_all_retention_anchors", "comfyui_memory_load", "force_full_system_cleanup",
    "load_once", "memory_history", "multigpu_memory_log", "set_keep_loaded", "soft_empty_cache_multigpu",
]  # fmt: skip


def set_keep_loaded(component: Any, keep: str | bool) -> None:
    """Say whether the model inside a component (MODEL, CLIP, VAE, ...) stays when memory is freed.

    `keep` is `default`, `keep` or `eject`; True is keep and False is eject. The choice applies to all patchers of the
    model. The last choice counts, except that keep wins if two nodes of one prompt disagree, and that `default` only
    withdraws the choice of the same node. Raises InputError for another value, or for a component without a model.
    """
    current().free_flow.keep(component, Standing.read(keep))


def load_once(node: str, values: Mapping[str, Any], load: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
    """The components that an earlier call returned for this node and these values, if they still exist; else `load()`.

    For loader nodes, so that a changed `keep_loaded` does not load a file again: `values` are all other inputs, and all
    of them are plain values. If a file of the components, or one that the values name, has changed, `load` is called.
    """
    flow, key = current().free_flow, f"node {node} {json.dumps(values, sort_keys=True)}"
    components = flow.loaded_before(key)
    if components is None:
        components = tuple(load())
        flow.remember_loaded(key, dict(values), components)
    return components


def force_full_system_cleanup(reason: str = "manual", force: bool = True) -> bool:
    """Ask for what `POST /free` with both flags does: unload models, drop cached outputs, collect, empty caches.

    The prompt worker acts between prompts, so a running prompt ends first. Without `force` only when RAM use is above
    the limit. Returns whether it was asked for.
    """
    return current().free_flow.ask_for_all(reason, force=force)


def soft_empty_cache_multigpu() -> dict[str, int]:
    """Empty the allocator caches of every device, with a log line for each.

    Returns the bytes that each device gave back, except devices that do not tell.
    """
    given_back = current().free_flow.clear_caches("soft_empty_cache_multigpu")
    return {str(device): count for device, count in given_back.items()}


def add_retention_anchor(model_patcher: Any, reason: str = "keep_loaded") -> None:
    """Hold a patcher so that it stays when memory is freed: as long as it is pinned, else until the next prompt ends.

    None is ignored. Raises InputError for what is no patcher and no component with a model.
    """
    if model_patcher is not None:
        current().free_flow.anchor(model_patcher, reason)


def clear_all_retention_anchors(reason: str = "manual_clear") -> int:
    """Stop holding models; returns how many were held. Loaded models stay loaded until memory is freed."""
    return current().free_flow.retention.clear(reason)


def multigpu_memory_log(identifier: str, tag: str, *, as_json: bool = False) -> Snapshot:
    """Take a snapshot of memory, log it as a readable line or as JSON, and keep it in the history."""
    return current().recorder.take(identifier, tag, as_json=as_json)


def comfyui_memory_load(tag: str) -> str:
    """One line about memory now, which is kept in the history and logged among the debug lines."""
    return current().recorder.take("memory", tag, level=logging.DEBUG).line()


def memory_history(last: int | None = None) -> list[Snapshot]:
    """The snapshots that were taken, oldest first; the newest 256 are kept."""
    return current().recorder.history(last)
