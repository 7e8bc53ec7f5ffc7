"""The memory of devices as ComfyUI counts it, and a snapshot of everything in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
from comfy import model_management

from ..devices.backends import Device, free_bytes
from ..devices.caches import cached_bytes
from ..devices.inventory import Inventory
from ..devices.torch_devices import torch_device
from ..lifecycle.policy import Standing
from ..plan import DeviceBudget, DeviceId
from ..stream.census import bytes_by_device
from ..telemetry.snapshot import DeviceMemory, ModelMemory, Snapshot
from .loaded_models import entries, standing


def accelerators(inventory: Inventory) -> Sequence[Device]:
    """None when the host was told to use the CPU only: asking accelerators for their memory would start them."""
    return () if model_management.cpu_mode() else inventory.accelerators


def budgets(devices: Iterable[DeviceId]) -> list[DeviceBudget]:
    """The devices' memory for one plan: what is free, plus what the host would free by unloading other models."""
    found = []
    for device in devices:
        where = torch_device(device)
        total = int(model_management.get_total_memory(where))
        free = int(model_management.get_free_memory(where)) + (0 if device.is_cpu else _unloadable(device))
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


def snapshot(identifier: str, tag: str, devices: Iterable[Device], anchors: int) -> Snapshot:
    """Memory now. Moves nothing and loads nothing."""
    memory = psutil.virtual_memory()
    return Snapshot(
        identifier=identifier,
        tag=tag,
        time=time.time(),
        process_bytes=psutil.Process().memory_info().rss,
        ram_used=memory.total - memory.available,
        ram_total=memory.total,
        devices=tuple(_device(device) for device in devices),
        models=tuple(_model(entry.model) for entry in entries()),
        anchors=anchors,
    )


def _device(device: Device) -> DeviceMemory:
    return DeviceMemory(device.label, free_bytes(device.id) or 0, device.total or 0, cached_bytes(device.id))


def _model(patcher: Any) -> ModelMemory:
    model, device, loaded = patcher.model, str(patcher.load_device), int(patcher.loaded_size())
    resting = {str(where): count for where, count in bytes_by_device(model).items() if where.type != "meta"}
    if patcher.is_dynamic() and loaded:
        resting[device] = max(resting.get(device, 0), loaded)
    return ModelMemory(
        name=type(model).__name__,
        id=id(model),
        device=device,
        loaded_bytes=loaded,
        standing=standing(model).value,
        resting=resting,
        dynamic=patcher.is_dynamic(),
    )
