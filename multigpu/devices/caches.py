"""Giving cached memory back: of every accelerator's allocator, and of the C library's heap."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..plan import DeviceId
from ..units import format_bytes
from .backends import in_use

log = logging.getLogger("multigpu")


def cached_bytes(device: DeviceId) -> int | None:
    """Bytes that the device's allocator holds, does not use, and could give back. None where it does not tell."""
    if not in_use(device):
        return 0
    module = getattr(torch, device.type, None)
    if device.type == "mps" and module is not None:
        return max(0, int(module.driver_allocated_memory()) - int(module.current_allocated_memory()))
    ask = getattr(module, "memory_stats", None)
    if ask is None:
        return 0 if device.is_cpu else None
    told = ask(device.index)
    reserved, used, split = (
        int(told.get(f"{name}.all.current", 0))
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    return max(0, reserved - used - split)


def reserved_bytes(device: DeviceId) -> int | None:
    """Bytes that the device's allocator holds, in use or cached. None where it does not tell."""
    if not in_use(device):
        return 0
    module = getattr(torch, device.type, None)
    if device.type == "mps" and module is not None:
        return int(module.driver_allocated_memory())
    ask = getattr(module, "memory_stats", None)
    if ask is None:
        return 0 if device.is_cpu else None
    return int(ask(device.index).get("reserved_bytes.all.current", 0))


def all_reserved(devices: Iterable[DeviceId]) -> dict[DeviceId, int | None]:
    """The `reserved_bytes` of each device."""
    return {device: reserved_bytes(device) for device in devices}


def failed_allocations(device: DeviceId) -> int:
    """How often the device had no memory for what was asked of its allocator. 0 where it does not tell."""
    module = getattr(torch, device.type, None)
    ask = getattr(module, "memory_stats_as_nested_dict", None) or getattr(module, "memory_stats", None)  # the faster
    return 0 if ask is None else int(ask(device.index).get("num_ooms", 0))


def clear_caches(devices: Iterable[DeviceId]) -> None:
    """Empty the allocator caches of the devices that have something in them, or do not tell.

    Waits for a device before emptying it. A device with nothing cached costs one question.
    """
    for device in devices:
        if cached_bytes(device) != 0:
            _empty(device)


def log_given_back(what: str, before: Mapping[DeviceId, int | None]) -> dict[DeviceId, int]:
    """One line for each device: what its allocator had reserved `before`, has now, and gave back; the last as result.

    `what` has emptied the caches. Devices that do not tell are not in the result.
    """
    given_back = {}
    for device, reserved in before.items():
        after = reserved_bytes(device)
        if reserved is None or after is None:
            words = "emptied; its driver does not tell how much it holds" if _can_empty(device) else "cannot be emptied"
            log.info("[MultiGPU] %s: cache of %s: %s", what, device, words)
            continue
        given_back[device] = max(0, reserved - after)
        figures = [format_bytes(count) for count in (reserved, after, given_back[device])]
        log.info("[MultiGPU] %s: memory of %s: %s reserved before, %s after, %s given back", what, device, *figures)
    return given_back


def _can_empty(device: DeviceId) -> bool:
    return hasattr(getattr(torch, device.type, None), "empty_cache")


def _empty(device: DeviceId) -> None:
    if not _can_empty(device):
        return
    module: Any = getattr(torch, device.type)
    if device.type == "mps":
        module.empty_cache()
        return
    with module.device(device.index):
        module.synchronize()
        module.empty_cache()


def trim_heap() -> bool:
    """Ask the C library to give freed heap pages back to the system; whether it did. Only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))
