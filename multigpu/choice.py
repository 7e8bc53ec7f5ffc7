"""Turns the widget values of a node into requests to the planner. Imports the standard library and the planner only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from .errors import InputError
from .plan import CPU, Auto, DeviceId, Mode, Request, VirtualVram, parse_request, request_from_widgets

DEFAULT_DEVICE = "default"
"""The device that ComfyUI would choose."""

GPU = "gpu"
"""The host's own word: `gpu:1` is the second accelerator, whatever its kind."""
ALIASES = {"corex": "cuda", "ixuca": "cuda", "hip": "cuda", "rocm": "cuda", "directml": "privateuseone"}
"""Other names that saved workflows and people use for a backend."""

AUTO, VIRTUAL_VRAM, EXPERT = "auto", "virtual VRAM", "expert"
MODES = (AUTO, VIRTUAL_VRAM, EXPERT)

DEFAULT, KEEP, EJECT = "default", "keep", "eject"
KEEP_CHOICES = (DEFAULT, KEEP, EJECT)
_KEEP_WORDS = {
    **{word: word for word in KEEP_CHOICES},
    **{"true": KEEP, "false": EJECT},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to place one component: the compute device as the workflow names it, the request, and `keep_loaded`."""

    compute: str
    request: Request
    keep: str = DEFAULT


def read_keep(value: object) -> str:
    """`default`, `keep` or `eject`; true and false mean keep and eject. Raises `InputError` for anything else."""
    word = _KEEP_WORDS.get(str(value).strip().lower()) if isinstance(value, (str, bool)) else None
    if word is None:
        raise InputError(
            f"keep_loaded is {value!r}; it can be default, keep or eject (or true for keep, false for eject)"
        )
    return word


def read_request(mode: str, virtual_vram_gb: float, donor_device: str, expert_mode_allocations: str) -> Request:
    """The request that the widgets of a place node mean; widgets of other modes are ignored.

    Raises `AllocationError` for invalid values.
    """
    if mode == AUTO:
        return Auto()
    if mode == VIRTUAL_VRAM:
        return request_from_widgets(virtual_vram_gb, donor_device, "")
    if mode == EXPERT:
        return parse_request(expert_mode_allocations)
    raise InputError(f"mode is {mode!r}; it can be {', '.join(MODES)}")


def is_default(text: str) -> bool:
    """Whether the choice of the device is left to the host."""
    return text.strip().lower() in ("", DEFAULT_DEVICE)


def device_here(named: DeviceId, here: Sequence[DeviceId]) -> DeviceId | None:
    """The device of this machine that `cuda:1`, `rocm:1`, `directml:0` or `gpu:1` means; None if there is none."""
    for device in (named, DeviceId(ALIASES.get(named.type, named.type), named.index)):
        if device in here:
            return device
    accelerators = [device for device in here if not device.is_cpu]
    index = named.index or 0
    return accelerators[index] if named.type == GPU and index < len(accelerators) else None


def renamed(request: Request, name: Callable[[DeviceId], DeviceId]) -> Request:
    """The request with every device that it names passed through `name`."""
    if isinstance(request, Auto):
        return request
    compute = None if request.compute is None else name(request.compute)
    if isinstance(request, VirtualVram):
        return replace(request, donors=tuple(map(name, request.donors)), compute=compute)
    parts = tuple(replace(part, device=None if part.device is None else name(part.device)) for part in request.parts)
    return replace(request, parts=parts, compute=compute)


def devices_of(request: Request) -> list[DeviceId]:
    """Every device that the request names, once."""
    if isinstance(request, Auto):
        return []
    named = request.donors if isinstance(request, VirtualVram) else [part.device for part in request.parts]
    return [device for device in dict.fromkeys([request.compute, *named]) if device is not None]


def without(request: Request, missing: Collection[DeviceId], compute: DeviceId | None) -> Request:
    """The request for a machine that lacks some devices. `compute` is the one that a node names beside it.

    The share of a missing compute device goes to the device that computes instead, the shares of other missing devices
    to RAM. A fraction of a missing device's memory cannot be computed, so that part goes to the remainder.
    """
    if isinstance(request, Auto):
        return request
    named = None if request.compute in missing else request.compute
    if isinstance(request, VirtualVram):
        donors = dict.fromkeys(CPU if donor in missing else donor for donor in request.donors)
        return replace(request, donors=tuple(donors), compute=named)
    parts = []
    for part in request.parts:
        if part.device not in missing:
            parts.append(part)
        elif part.device in (request.compute, compute):
            parts.append(replace(part, device=None))
        elif request.mode is not Mode.FRACTION:
            parts.append(replace(part, device=CPU))
    return replace(request, parts=tuple(parts), compute=named) if parts else Auto()


def fitted(request: Request, compute: DeviceId) -> Request:
    """`request` without the compute device among its donors.

    If the CPU computes and is its own only donor, as old workflows say on a machine without GPU, nothing leaves it. An
    accelerator as its own only donor is not changed: the planner refuses it.
    """
    if not isinstance(request, VirtualVram) or compute not in request.donors:
        return request
    others = tuple(donor for donor in request.donors if donor != compute)
    if others:
        return replace(request, donors=others)
    return replace(request, bytes=0) if compute.is_cpu else request
