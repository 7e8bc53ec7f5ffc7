"""The devices of this machine as budgets, for a command line that names none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from ..devices.ram import ram
from ..plan import CPU, DeviceBudget


def machine_budgets(note: Callable[[str], None]) -> list[DeviceBudget]:
    """The accelerators that torch sees, then the cpu. `note` is told, in a sentence, what could not be found out."""
    total, free = ram()
    missing = [name for name in ("torch", "psutil") if find_spec(name) is None]
    if missing:
        note(f"{missing[0]} is not installed, so only the cpu is known; name other devices with --devices")
    return [*([] if missing else _accelerators(note)), DeviceBudget(CPU, total, free)]


def _accelerators(note: Callable[[str], None]) -> list[DeviceBudget]:
    from ..devices.inventory import Inventory

    budgets, inventory = [], Inventory()
    for problem in inventory.problems:
        note(problem)
    for device in inventory.accelerators:
        free = inventory.free(device.id)
        if free is None or device.total is None:
            note(f"torch does not report the memory of {device.id}; name it with --devices")
        else:
            budgets.append(DeviceBudget(device.id, device.total, min(free, device.total)))
    return budgets
