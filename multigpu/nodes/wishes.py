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
ALONE = "vae_device"
"""The device of the part of a checkpoint that is not spread."""


def parts(values: Mapping[str, Any]) -> list[str]:
    """What the widgets of each part begin with whose weights the node spreads: nothing where it has one part only."""
    return [name.removesuffix(SIZE) for name in values if name.endswith(SIZE)] or [""]


def wish(values: Mapping[str, Any], resolver: Resolver, part: str) -> Target:
    """What the widgets ask for one part, by name. The device of a part that is not spread is looked at with the first.

    Raises RequestError.
    """
    named = next((part + name for name in (COMPUTE, DEVICE) if part + name in values), COMPUTE)
    compute = _text(values, named, DEFAULT_DEVICE)
    with _about(KEEP):
        standing = Standing.read(values.get(KEEP, Standing.DEFAULT.value))
    with _about(named):
        device = resolver.device(compute)
    if part == parts(values)[0]:
        with _about(ALONE):
            resolver.device(_text(values, ALONE, DEFAULT_DEVICE))
    field = speaking(values, part)
    with _about(field, str(values.get(field, "")), resolver.inventory):
        return resolver.target(compute, _request(values, part, device, resolver.inventory), standing)


def speaking(values: Mapping[str, Any], part: str) -> str:
    """The widget that names devices or amounts, by the mode and by what is filled in."""
    expert, donor = part + EXPERT_TEXT, part + DONOR
    if "mode" in values:
        return {"virtual VRAM": donor, "expert": expert}.get(str(values["mode"]), "mode")
    return expert if str(values.get(expert, "")).strip() else donor


def _request(values: Mapping[str, Any], part: str, compute: DeviceId | None, inventory: Inventory) -> Request:
    if part + SIZE not in values:
        return VirtualVram(0, (CPU,))
    size, donors, expert = _number(values, part + SIZE), _text(values, part + DONOR, str(CPU)), part + EXPERT_TEXT
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
