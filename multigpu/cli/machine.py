"""The devices of this machine as budgets, for a command line that names none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec

from ..errors import InputError
from ..plan import CPU, DeviceBudget


def machine_budgets(note: Callable[[str], None]) -> list[DeviceBudget]:
    """The accelerators that torch sees, then the cpu. `note` is told, in a sentence, what could not be found out."""
    total, free = _ram()
    missing = [name for name in ("torch", "psutil") if find_spec(name) is None]
    if missing:
        note(f"{missing[0]} is not installed, so only the cpu is known; name other devices with --devices")
    return [*([] if missing else _accelerators(note)), DeviceBudget(CPU, total, min(free, total))]


def _accelerators(note: Callable[[str], None]) -> list[DeviceBudget]:
    from ..devices.inventory import Inventory

    budgets, inventory = [], Inventory()
    for problem in inventory.problems:
        note(problem)
    for device in inventory.accelerators:
        free = inventory.free(device.id)
        if free is None or device.total is None:
            note(f"torch does not report the memory of {device.label}; name it with --devices")
        else:
            budgets.append(DeviceBudget(device.id, device.total, min(free, device.total)))
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
