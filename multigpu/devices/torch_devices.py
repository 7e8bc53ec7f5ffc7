"""`DeviceId` and torch's own devices: from one to the other, and which one is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..plan import DeviceId
from ..plan.types import WITHOUT_INDEX

DIRECTML, TORCH_DIRECTML = "directml", "privateuseone"
"""What people and workflows call DirectML's devices, and what torch calls them."""

FILE = torch.device("meta")
"""Stands for the model file among torch's devices: a home that has no memory of its own."""


def torch_device(device: DeviceId) -> torch.device:
    name = str(device)
    return FILE if device.is_disk else torch.device(name.replace(DIRECTML, TORCH_DIRECTML))


def device_name(device: torch.device) -> str:
    """What people call a device: torch's name for it, but `directml:0` for `privateuseone:0`."""
    return str(device).replace(TORCH_DIRECTML, DIRECTML)


def device_id(device: torch.device) -> DeviceId:
    """A torch device as a `DeviceId`; without an index it is the backend's current device."""
    if device.type in WITHOUT_INDEX:
        return DeviceId(device.type, None)
    index, module = device.index, _with_current(device)
    if index is None:
        index = 0 if module is None else module.current_device()
    return DeviceId(DIRECTML if device.type == TORCH_DIRECTML else device.type, index)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is, as the host names it. A tensor says `mps:0`, the host `mps`, and torch finds them unequal."""
    where = tensor.device
    return torch.device(where.type) if where.type in WITHOUT_INDEX else where


def _with_current(device: torch.device) -> Any:
    """torch.cuda, torch.xpu, torch.npu ... if it has a current device to choose; None for all other devices."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "current_device") and hasattr(module, "set_device") else None


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make `device` torch's current one in this thread; the previous one is restored, whatever happens inside.

    Does nothing for a backend in which torch has no current device.
    """
    module = _with_current(device)
    if module is None:
        yield
        return
    before = module.current_device()
    module.set_device(device)
    try:
        yield
    finally:
        module.set_device(before)
