"""What a node asks for: made once, where the node runs, with every device name resolved for this machine."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .devices.names import is_default
from .errors import UnknownDevice
from .lifecycle.policy import Standing
from .plan import DeviceId, Request, check_compute

if TYPE_CHECKING:
    from .devices.inventory import Inventory

log = logging.getLogger("multigpu")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one component computes (None: where ComfyUI would), where its weights rest, and whether it stays loaded."""

    compute: DeviceId | None
    request: Request
    standing: Standing = Standing.DEFAULT


@dataclass(frozen=True, slots=True)
class Resolver:
    """Finds the devices that nodes name.

    A device that is not on this machine raises `UnknownDevice`; with `fall_back` another one takes its place, and a
    warning says so.
    """

    inventory: Inventory
    fall_back: bool

    def target(self, compute: str, request: Request, standing: Standing = Standing.DEFAULT) -> Target:
        """`compute` is the text of the widget; a compute device that the request names counts if that is `default`."""
        named = self.device(compute)
        missing = [device for device in request.devices() if not device.is_disk and self.inventory.find(device) is None]
        if missing and self.fall_back:
            names = ", ".join(map(str, missing))
            log.warning("[MultiGPU] not on this machine: %s; other devices are used (MULTIGPU_FALL_BACK)", names)
            request = request.without(missing, None if is_default(compute) else _read(compute))
        request = request.renamed(lambda device: device if device.is_disk else self.inventory.resolve(str(device)))
        check_compute(request.compute)
        return Target(named or request.compute, request, standing)

    def device(self, text: str) -> DeviceId | None:
        """The device that a widget names; None for the one that ComfyUI would choose."""
        if is_default(text):
            return None
        try:
            return self.inventory.resolve(text)
        except UnknownDevice as unknown:
            if not self.fall_back:
                raise
            log.warning("[MultiGPU] %s; falling back to ComfyUI's default device (MULTIGPU_FALL_BACK)", unknown)
            return None


def _read(text: str) -> DeviceId | None:
    """The device of that name; None for one of another machine."""
    with suppress(UnknownDevice):
        return DeviceId.parse(text)
    return None
