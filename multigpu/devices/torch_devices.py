"""`DeviceId` and torch's own devices: from one to the other, and which one is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..plan import CPU, DeviceId

WITHOUT_CURRENT = {"cpu", "mps", "privateuseone"}
"""Backends where torch has no current device to choose."""


def torch_device(device: DeviceId) -> torch.device:
    return torch.device(str(device))


def device_id(device: torch.device) -> DeviceId:
    """A torch device as a `DeviceId`; without an index it is the backend's current device."""
    if device.type == "cpu":
        return CPU
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    return DeviceId(device.type, index)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make `device` torch's current one in this thread; the previous one is restored, whatever happens inside."""
    if device.type in WITHOUT_CURRENT:
        yield
        return
    module = torch.get_device_module(device)
    before = module.current_device()
    module.set_device(device)
    try:
        yield
    finally:
        module.set_device(before)
