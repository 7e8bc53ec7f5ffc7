"""Giving cached memory back: of every accelerator's allocator, and of the C library's heap."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ..plan import DeviceId


def cached_bytes(device: DeviceId) -> int:
    """Bytes that the device's allocator holds, does not use, and could give back. 0 where it does not tell."""
    module = getattr(torch, device.type, None)
    if device.type == "mps" and module is not None:
        return max(0, int(module.driver_allocated_memory()) - int(module.current_allocated_memory()))
    ask = getattr(module, "memory_stats", None)
    if ask is None:
        return 0
    told = ask(device.index)
    reserved, used, split = (
        int(told.get(f"{name}.all.current", 0))
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    return max(0, reserved - used - split)


def failed_allocations(device: DeviceId) -> int:
    """How often the device had no memory for what was asked of its allocator. 0 where it does not tell."""
    module = getattr(torch, device.type, None)
    ask = getattr(module, "memory_stats_as_nested_dict", None) or getattr(module, "memory_stats", None)  # the faster
    return 0 if ask is None else int(ask(device.index).get("num_ooms", 0))


def clear_caches(devices: Iterable[DeviceId]) -> dict[DeviceId, int]:
    """Empty the allocator caches of the devices that have something in them; the bytes each gave back.

    Waits for a device before emptying it. A device with nothing cached costs one question.
    """
    freed = {}
    for device in devices:
        before = cached_bytes(device)
        if before:
            _empty(device)
            freed[device] = before - cached_bytes(device)
    return freed


def _empty(device: DeviceId) -> None:
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
