"""What the user asks for, in one of three ways: automatic, virtual VRAM, or an expert allocation.

`grammar` reads requests from text and writes them; that text is also how a request is saved, since reading it back
gives the equal request. `quotas` turns requests into bytes per device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import AllocationError
from .types import CPU, DeviceId

SHARE_DIGITS = 9
WHOLE = 1_000_000_000
"""Shares are counted in billionths of a whole, so that they stay exact integers."""


class Mode(str, Enum):
    """How the numbers of an expert allocation are meant."""

    BYTES = "bytes"
    RATIO = "ratio"
    FRACTION = "fraction"


@dataclass(frozen=True, slots=True)
class Part:
    """One device of an expert allocation.

    `device` None is the compute device (a lone fraction names none). `amount` is in bytes, or in billionths: of the
    model (ratio) or of the device's own memory (fraction). `remainder` is the star: take what the other parts leave,
    at most `amount` where there is one. A part without an amount always has the star.
    """

    device: DeviceId | None
    amount: int | None
    remainder: bool = False


class Request:
    """What every request can do, for one that names no device. `compute` is the compute device that it names itself."""

    __slots__ = ()
    compute: DeviceId | None

    @property
    def spreads(self) -> bool:
        """Whether weights may leave the compute device."""
        return True

    def devices(self) -> list[DeviceId]:
        """Every device that it names, once."""
        return []

    def renamed(self, name: Callable[[DeviceId], DeviceId]) -> Request:
        """The request with every device passed through `name`. Raises AllocationError if two become the same."""
        return self

    def without(self, missing: Collection[DeviceId], compute: DeviceId | None) -> Request:
        """The request for a machine that lacks some devices; `compute` is the compute device that a node names.

        The share of a missing compute device goes to the device that computes instead, all other shares to RAM.
        """
        return self

    def fitted(self, compute: DeviceId) -> Request:
        """The request without the compute device among its donors."""
        return self


@dataclass(frozen=True, slots=True)
class Auto(Request):
    """The planner decides. `reserve` bytes of the compute device stay free for inference (None: `default_reserve`)."""

    reserve: int | None = None
    compute: DeviceId | None = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Expert(Request):
    """Bytes, ratios or fractions per device, in the user's order. `compute` is set when the text itself names it."""

    mode: Mode
    parts: tuple[Part, ...]
    compute: DeviceId | None = None

    def devices(self) -> list[DeviceId]:
        return _once(self.compute, *(part.device for part in self.parts))

    def renamed(self, name: Callable[[DeviceId], DeviceId]) -> Expert:
        _check_distinct([part.device for part in self.parts], name)
        parts = tuple(replace(part, device=part.device and name(part.device)) for part in self.parts)
        return replace(self, parts=parts, compute=self.compute and name(self.compute))

    def without(self, missing: Collection[DeviceId], compute: DeviceId | None) -> Expert | Auto:
        """A fraction of a missing device's memory cannot be computed, so that part goes to the remainder."""
        parts = []
        for part in self.parts:
            if part.device not in missing:
                parts.append(part)
            elif part.device in (self.compute, compute):
                parts.append(replace(part, device=None))
            elif self.mode is not Mode.FRACTION:
                parts.append(replace(part, device=CPU))
        named = None if self.compute in missing else self.compute
        return replace(self, parts=tuple(parts), compute=named) if parts else Auto()


@dataclass(frozen=True, slots=True)
class VirtualVram(Request):
    """So many bytes leave the compute device; the donors fill up in the order given."""

    bytes: int
    donors: tuple[DeviceId, ...]
    compute: DeviceId | None = None

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise AllocationError(
                f"virtual VRAM is {self.bytes} bytes; give 0 (nothing leaves the compute device) or more"
            )
        if not self.donors:
            raise AllocationError("virtual VRAM without a donor; name at least one device, for example cpu")
        if len(set(self.donors)) != len(self.donors):
            names = ",".join(map(str, self.donors))
            raise AllocationError(f"the donors {names} name a device twice; write each donor once")

    @property
    def spreads(self) -> bool:
        return self.bytes > 0

    def devices(self) -> list[DeviceId]:
        return _once(self.compute, *self.donors)

    def renamed(self, name: Callable[[DeviceId], DeviceId]) -> VirtualVram:
        _check_distinct(self.donors, name)
        return replace(self, donors=tuple(map(name, self.donors)), compute=self.compute and name(self.compute))

    def without(self, missing: Collection[DeviceId], compute: DeviceId | None) -> VirtualVram:
        donors = dict.fromkeys(CPU if donor in missing else donor for donor in self.donors)
        return replace(self, donors=tuple(donors), compute=None if self.compute in missing else self.compute)

    def fitted(self, compute: DeviceId) -> VirtualVram:
        """If the CPU computes and is its own only donor, as old workflows say on a machine without GPU, nothing leaves
        it. An accelerator as its own only donor is not changed: the planner refuses it.
        """
        others = tuple(donor for donor in self.donors if donor != compute)
        if others:
            return replace(self, donors=others)
        return replace(self, bytes=0) if compute.is_cpu else self


def _check_distinct(devices: Iterable[DeviceId | None], name: Callable[[DeviceId], DeviceId]) -> None:
    """Raise AllocationError if two of the devices are one on this machine."""
    named: dict[DeviceId, DeviceId] = {}
    for device in _once(*devices):
        other = named.setdefault(name(device), device)
        if other != device:
            raise AllocationError(
                f"{other} and {device} are the same device, {name(device)}; write only one of the two"
            )


def _once(*devices: DeviceId | None) -> list[DeviceId]:
    return [device for device in dict.fromkeys(devices) if device is not None]
