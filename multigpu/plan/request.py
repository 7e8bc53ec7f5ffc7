"""What the user asks for, in one of three ways: automatic, virtual VRAM, or an expert allocation.

`grammar` reads requests from text and writes them; that text is also how a request is saved, since reading it back
gives the equal request. `quotas` turns requests into bytes per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import AllocationError
from .types import DeviceId

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


@dataclass(frozen=True, slots=True)
class Expert:
    """Bytes, ratios or fractions per device, in the user's order. `compute` is set when the text itself names it."""

    mode: Mode
    parts: tuple[Part, ...]
    compute: DeviceId | None = None


@dataclass(frozen=True, slots=True)
class VirtualVram:
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


@dataclass(frozen=True, slots=True)
class Auto:
    """The planner decides. `reserve` bytes of the compute device stay free for inference (None: `default_reserve`)."""

    reserve: int | None = None


Request = Auto | VirtualVram | Expert
