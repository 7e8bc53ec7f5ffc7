"""The devices of this machine as budgets, for a command line that names none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..errors import InputError
from ..plan import CPU, DeviceBudget, DeviceId


def machine_budgets(note: Callable[[str], None]) -> list[DeviceBudget]:
    """The accelerators that torch sees, then the cpu. `note` is told, in a sentence, what could not be found out."""
    budgets: list[DeviceBudget] = []
    if find_spec("torch") is None:
        note("torch is not installed, so only the cpu is known; name other devices with --devices")
    else:
        budgets += _accelerators(importlib.import_module("torch"), note)
    total, free = _ram()
    return [*budgets, DeviceBudget(CPU, total, min(free, total))]


def _accelerators(torch: Any, note: Callable[[str], None]) -> list[DeviceBudget]:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return []
    kind = accelerator.current_accelerator().type
    ask = getattr(getattr(torch, kind, None), "mem_get_info", None)
    if ask is None:
        note(f"torch does not report the memory of {kind} devices; name them with --devices")
        return []
    budgets = []
    for index in range(accelerator.device_count()):
        free, total = ask(index)
        budgets.append(DeviceBudget(DeviceId(kind, index), total, free))
    return budgets


def _ram() -> tuple[int, int]:
    """RAM of the machine in bytes: total and available."""
    if find_spec("psutil") is not None:
        memory = importlib.import_module("psutil").virtual_memory()
        return memory.total, memory.available
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise InputError(
            "the size of the RAM cannot be found without psutil; install psutil, or name the devices with --devices"
        ) from None
