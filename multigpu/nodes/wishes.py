"""What the widgets of one of our nodes ask for, found out without running the node.

The same functions read them as when the node runs. A problem is a `RequestError` that names the widget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..devices.inventory import Inventory
from ..devices.names import DEFAULT_DEVICE
from ..errors import AllocationError, AllocationSyntaxError, InputError, RequestError, UnknownDevice
from ..lifecycle.policy import Standing
from ..plan import CPU, DeviceId, Request, VirtualVram, request_from_mode, request_from_widgets
from ..target import Resolver, Target
from .loader_table import COMPUTE, DEVICE, OTHER_VRAM
from .widgets import SPREAD

SIZE, DONOR, EXPERT_TEXT = SPREAD
KEEP = "keep_loaded"
PARTS = ("", "unet_")
"""What the widgets of a node begin with that are about its diffusion model, or its only one."""


def wish(values: Mapping[str, Any], resolver: Resolver) -> Target:
    """What the widgets ask for, by name. Raises RequestError."""
    prefix = _prefix(values)
    named = next((part + name for part in PARTS for name in (COMPUTE, DEVICE) if part + name in values), COMPUTE)
    compute = _text(values, named, DEFAULT_DEVICE)
    with _about(KEEP):
        standing = Standing.read(values.get(KEEP, Standing.DEFAULT.value))
    with _about(named):
        device = resolver.device(compute)
    field = speaking(values)
    with _about(field, str(values.get(field, "")), resolver.inventory):
        return resolver.target(compute, _request(values, prefix, device, resolver.inventory), standing)


def _prefix(values: Mapping[str, Any]) -> str:
    return next((part for part in PARTS if part + SIZE in values), PARTS[0])


def speaking(values: Mapping[str, Any]) -> str:
    """The widget that names devices or amounts, by the mode and by what is filled in."""
    prefix = _prefix(values)
    expert, donor = prefix + EXPERT_TEXT, prefix + DONOR
    if "mode" in values:
        return {"virtual VRAM": donor, "expert": expert}.get(str(values["mode"]), "mode")
    return expert if str(values.get(expert, "")).strip() else donor


def _request(values: Mapping[str, Any], prefix: str, compute: DeviceId | None, inventory: Inventory) -> Request:
    if prefix + SIZE not in values:
        return VirtualVram(0, (CPU,))
    size, donors, expert = _number(values, prefix + SIZE), _text(values, prefix + DONOR, str(CPU)), prefix + EXPERT_TEXT
    if values.get(OTHER_VRAM) is True:
        others = [str(device.id) for device in inventory.accelerators if device.id != compute]
        donors = ",".join([*others, str(CPU)])
    text = _text(values, expert, "")
    if "mode" in values:
        return request_from_mode(_text(values, "mode", ""), size, donors, text)
    return request_from_widgets(size, donors, text)


@contextmanager
def _about(field: str, text: str = "", inventory: Inventory | None = None) -> Iterator[None]:
    """Errors inside are about this widget."""
    try:
        yield
    except RequestError:
        raise
    except AllocationSyntaxError as problem:
        raise RequestError(str(problem), field=field, column=problem.column) from None
    except UnknownDevice as problem:
        column = None if inventory is None else _column_of_missing(text, inventory)
        raise RequestError(str(problem), field=field, column=column) from None
    except InputError as problem:
        raise RequestError(str(problem), field=field) from None


def _column_of_missing(text: str, inventory: Inventory) -> int | None:
    """Where a text first names a device that this machine does not have."""
    for piece in re.finditer(r"[^\s,;#]+", text):
        try:
            device = DeviceId.parse(piece[0])
        except AllocationError:
            continue
        if not device.is_disk and inventory.find(device) is None:
            return piece.start() + 1
    return None


def _text(values: Mapping[str, Any], name: str, default: str) -> str:
    value = values.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name} is {value!r}; it is a text", field=name)
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e6:
        raise RequestError(f"{name} is {value!r}; it is a number of gigabytes from 0", field=name)
    return float(value)
