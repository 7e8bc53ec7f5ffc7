"""The memory of devices as ComfyUI counts it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import psutil
from comfy import model_management

from ..devices.backends import Device, in_use
from ..devices.inventory import Inventory
from ..devices.ram import ram
from ..devices.torch_devices import torch_device
from ..lifecycle.policy import Standing
from ..plan import DeviceBudget, DeviceId
from ..plan.types import UNKNOWN
from .loaded_models import entries, standing


def accelerators(inventory: Inventory) -> Sequence[Device]:
    """None when the host was told to use the CPU only: asking accelerators for their memory would start them."""
    return () if model_management.cpu_mode() else inventory.accelerators


def budgets(devices: Iterable[Device], needed: Collection[DeviceId] | None = None) -> list[DeviceBudget]:
    """The devices' memory for one plan: what is free, plus what the host would free by unloading other models.

    Of devices that do not tell it, the host's figure stands for nothing: for DirectML's that is 1 GiB. To ask a device
    is to use it. One that this process does not use, and that is not `needed` (None: all are), is not asked: all its
    memory counts as free.
    """
    found = []
    for each in devices:
        device, where = each.id, torch_device(each.id)
        if each.total is None:
            found.append(DeviceBudget(device, UNKNOWN, UNKNOWN))
            continue
        if needed is not None and device not in needed and not in_use(device):
            found.append(DeviceBudget(device, each.total, each.total))
            continue
        total = int(model_management.get_total_memory(where))
        free = int(model_management.get_free_memory(where)) + (0 if device.is_cpu else _unloadable(device))
        if device.is_cpu:
            total, free = (min(pair) for pair in zip((total, free), ram(), strict=True))
        found.append(DeviceBudget(device, total, min(free, total)))
    return found


def _unloadable(device: DeviceId) -> int:
    """Bytes on an accelerator that belong to models that are not set to keep."""
    patchers = [entry.model for entry in entries(torch_device(device))]
    return sum(int(patcher.loaded_size()) for patcher in patchers if standing(patcher.model) is not Standing.KEEP)


def ram_used() -> float:
    """The part of the machine's RAM that is in use, from 0 to 1, as the host counts it."""
    memory = psutil.virtual_memory()
    return 1.0 - float(memory.available / memory.total)
