"""The data the planner reads and writes: devices, blocks, budgets and plans.

Everything here is immutable, hashable and plain: `to_json` gives values that `json.dumps` takes as they are,
`from_json` gives the equal object back. Bytes are integers, times are seconds, speeds are bytes per second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import total_ordering
from typing import Any

from ..errors import AllocationError, InputError, UnknownDevice

CPU_TYPE, DISK_TYPE = "cpu", "disk"
WITHOUT_INDEX = (CPU_TYPE, "mps", DISK_TYPE)
"""Types of which a machine has one device, named without a number. `disk` is the model file: torch does not know it."""
SCHEME = "ray://"
"""How the names of devices of other machines begin. No block can rest there."""
_DEVICE = re.compile(r"([a-z]+)(?::([0-9]{1,4}))?", re.ASCII)

RAM_BANDWIDTH = 25e9
"""Assumed speed from RAM when nothing was measured: pinned memory over PCIe 4.0 x16."""
PEER_BANDWIDTH = 12e9
"""Assumed speed from another accelerator when nothing was measured: a card in an x8 slot, or without peer access."""
DISK_BANDWIDTH = 2e9
"""Assumed speed from the model file when nothing was measured: an NVMe drive of an older generation."""

UNKNOWN = 1 << 62
"""Stands for the memory of a device that does not tell how much it has: more bytes than any model."""


@total_ordering
@dataclass(frozen=True, slots=True)
class DeviceId:
    """A device as torch and the host name it: its type and, except for `WITHOUT_INDEX`, its index.

    `str()` gives `cuda:0`, `mps`, `cpu` or `disk`.
    """

    type: str
    index: int | None

    def __post_init__(self) -> None:
        if (self.index is None) != (self.type in WITHOUT_INDEX):
            names = ", ".join(WITHOUT_INDEX)
            raise AllocationError(
                f"device type {self.type!r} with index {self.index}: {names} have no index, every other device has one"
            )

    @classmethod
    def parse(cls, text: str) -> DeviceId:
        """Read `cuda:0`, `cuda` (the same), `mps`, `mps:0` (the same), `cpu` or `disk`.

        Raises `AllocationError`, for a device of another machine `UnknownDevice`.
        """
        if text.strip().lower().startswith(SCHEME):
            raise UnknownDevice(
                f"{text!r} is a device of another machine: it can only be the compute device of Place Model, Place "
                "CLIP or Place VAE, with MULTIGPU_RAY set, and weights cannot rest there"
            )
        match = _DEVICE.fullmatch(text.strip().lower())
        if match is None:
            raise AllocationError(f"{text!r} is not a device; write its type and number, as in cuda:0, or cpu")
        kind, index = match.group(1), int(match.group(2) or 0)
        if kind not in WITHOUT_INDEX:
            return cls(kind, index)
        if index:
            raise AllocationError(f"{text!r} is not a device: there is one {kind}; write {kind}")
        return cls(kind, None)

    @property
    def is_cpu(self) -> bool:
        return self.type == CPU_TYPE

    @property
    def is_disk(self) -> bool:
        return self.type == DISK_TYPE

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __lt__(self, other: DeviceId) -> bool:
        return (self.type, self.index or 0) < (other.type, other.index or 0)


CPU = DeviceId(CPU_TYPE, None)
DISK = DeviceId(DISK_TYPE, None)
"""The model file as a home: bytes that rest in it take no RAM, and are read each time they are used."""


class Reason(str, Enum):
    """Why a block rests where it rests. `explain.REASON_TEXT` has the sentence for each."""

    RESIDENT = "resident"
    LOW_INTENSITY = "low_intensity"
    STREAMED = "streamed"
    HOISTED = "hoisted"
    TINY = "tiny"
    TIED = "tied"
    EMBEDDING = "embedding"
    NOT_CASTABLE = "not_castable"
    NOT_IN_FILE = "not_in_file"


@dataclass(frozen=True, slots=True)
class Block:
    """One entry of the host's load list.

    `bytes` are the stored bytes, scales included. `order` is the place in the order of execution (None: as declared).
    `compute` is the time in seconds that the compute device spends on this block in one step (None: unknown; the
    planner then assumes the same time per byte as in the blocks it knows). `immovable` says why the block has to stay
    on the compute device (None: it may leave). `in_file` says whether its bytes can rest in the model file. `once` says
    that it can be hoisted: it sees one token, which does not depend on the picture.
    """

    name: str
    bytes: int
    order: int | None = None
    compute: float | None = None
    immovable: Reason | None = None
    in_file: bool = False
    once: bool = False

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise InputError(f"block {self.name!r} has {self.bytes} bytes; give 0 or more")
        if self.compute is not None and not 0 <= self.compute < float("inf"):
            raise InputError(
                f"block {self.name!r} has a compute time of {self.compute}; give finite seconds from 0, or None"
            )


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What a device offers to one plan.

    `total` is its memory, `free` the bytes that this plan may use of it, `bandwidth` the bytes per second from it to
    the compute device (None: unknown, see `link_speed`). If total and free are `UNKNOWN`, whatever a user asks of the
    device counts as fitting there, and `auto` moves nothing to it or from it.
    """

    device: DeviceId
    total: int
    free: int
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.free <= self.total:
            raise InputError(
                f"{self.device} has {self.free} of {self.total} bytes free; give a free memory between 0 and total"
            )
        if self.bandwidth is not None and not 0 < self.bandwidth < float("inf"):
            raise InputError(
                f"{self.device} has a link of {self.bandwidth} bytes/s; give a positive speed, or None if it is unknown"
            )

    @property
    def known(self) -> bool:
        """Whether the device tells how much memory it has."""
        return self.total != UNKNOWN

    @property
    def link_speed(self) -> float:
        """The bandwidth, or what is assumed for this kind of device."""
        return assumed_speed(self.device) if self.bandwidth is None else self.bandwidth


def assumed_speed(device: DeviceId) -> float:
    """Bytes per second from a device whose link was not measured."""
    return {CPU: RAM_BANDWIDTH, DISK: DISK_BANDWIDTH}.get(device, PEER_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Placement:
    """One block of a plan: where its bytes rest, where it runs, and why. `once`: see `Block`."""

    block: str
    bytes: int
    home: DeviceId
    runs_on: DeviceId
    reason: Reason
    once: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a step: its seconds, those of computing, and those for which each link is busy.

    It is an estimate unless compute times were `measured` in steps of the model. Once steps with this very plan were
    timed, `step` is what they took, and `simulated` what the simulator says.
    """

    step: float
    compute: float
    links: tuple[tuple[DeviceId, float], ...]
    measured: bool = False
    simulated: float | None = None

    @property
    def slowdown(self) -> float:
        """Step time over the step time with every block resident."""
        return self.step / self.compute if self.compute else 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """What the forecast of a plan is made from.

    `seconds` are the compute seconds of its blocks, in order; `measured` says whether they were measured. `speeds` are
    bytes per second from other devices.
    """

    seconds: tuple[float, ...]
    speeds: tuple[tuple[DeviceId, float], ...] = ()
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each block of one model rests, in order of execution.

    `ring_bytes` is the staging memory on the compute device that the plan counts on; 0 when nothing is streamed.
    Two plans are equal when they place the same blocks in the same way; forecast and timing do not count.
    """

    compute: DeviceId
    placements: tuple[Placement, ...]
    ring_bytes: int = 0
    forecast: Forecast | None = field(default=None, compare=False)
    timing: Timing | None = field(default=None, compare=False, repr=False)
    streamed: tuple[Placement, ...] = field(init=False, repr=False, compare=False)
    total_bytes: int = field(init=False, repr=False, compare=False)
    _by_name: dict[str, Placement] = field(init=False, repr=False, compare=False)
    _bytes: dict[DeviceId, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, Placement] = {}
        bytes_by_home = {self.compute: 0}
        streamed = []
        for placement in self.placements:
            if placement.block in by_name:
                raise InputError(f"the block {placement.block!r} is in the plan twice; block names must differ")
            by_name[placement.block] = placement
            home = placement.home
            bytes_by_home[home] = bytes_by_home.get(home, 0) + placement.bytes
            if home is not placement.runs_on and home != placement.runs_on:
                streamed.append(placement)
        # The derived fields of a frozen object are filled here, once.
        object.__setattr__(self, "streamed", tuple(streamed))
        object.__setattr__(self, "total_bytes", sum(bytes_by_home.values()))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_bytes", bytes_by_home)

    def __hash__(self) -> int:
        # Cheap on purpose: equal plans agree in these, and plans that differ only elsewhere are told apart by `==`.
        return hash((self.compute, self.ring_bytes, len(self.placements), *self._bytes.items()))

    def __getitem__(self, block: str) -> Placement:
        """The placement of a block. Raises `KeyError` for a block that is not in the plan."""
        return self._by_name[block]

    def __contains__(self, block: object) -> bool:
        return block in self._by_name

    def bytes_on(self, device: DeviceId) -> int:
        """Bytes of the model that rest on the device."""
        return self._bytes.get(device, 0)

    def bytes_by_home(self) -> dict[DeviceId, int]:
        """Bytes per home, the compute device first, the others as they first appear in the order of execution."""
        return dict(self._bytes)

    @property
    def hoisted(self) -> tuple[Placement, ...]:
        """The blocks that are computed ahead for all steps of a run, and copied only in its first one."""
        return tuple(placement for placement in self.streamed if placement.reason is Reason.HOISTED)

    def to_json(self) -> dict[str, Any]:
        """Plain values. `runs_on` is written only where it is not the compute device."""
        placements = []
        for p in self.placements:
            entry = {"block": p.block, "bytes": p.bytes, "home": str(p.home), "reason": p.reason.value}
            placements.append(entry if p.runs_on == self.compute else {**entry, "runs_on": str(p.runs_on)})
        forecast = self.forecast and {
            "step": self.forecast.step,
            "compute": self.forecast.compute,
            "links": {str(device): seconds for device, seconds in self.forecast.links},
            "measured": self.forecast.measured,
        }
        return {
            "version": 1,
            "compute": str(self.compute),
            "ring_bytes": self.ring_bytes,
            "bytes_by_home": {str(device): count for device, count in self._bytes.items()},
            "forecast": forecast,
            "placements": placements,
        }
