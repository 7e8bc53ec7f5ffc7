"""A snapshot of this process, its devices and the models that the host has loaded."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psutil
from comfy import model_management

from ..devices.backends import Device, free_bytes
from ..devices.caches import cached_bytes
from ..lifecycle.policy import FLAG, Standing, standing_of
from ..stream.census import bytes_by_device
from ..telemetry.snapshot import DeviceMemory, ModelMemory, Snapshot


def entries() -> list[Any]:
    """The entries of the host's list of loaded models whose patcher still exists."""
    return [entry for entry in list(model_management.current_loaded_models) if entry.model is not None]


def standing(model: Any) -> Standing:
    """Whether an inner model is pinned, flagged or unmanaged."""
    return standing_of(getattr(model, FLAG, None))


def ram_used() -> float:
    """The part of the machine's RAM that is in use, from 0 to 1, as the host counts it."""
    memory = psutil.virtual_memory()
    return 1.0 - memory.available / memory.total


def look(identifier: str, tag: str, devices: Iterable[Device], anchors: int) -> Snapshot:
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
