"""One look at memory, as plain data."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from ..plan.types import Forecast, Plan
from ..units import MIB, format_bytes

VERSION = 2
"""Of the form that `Snapshot.to_json` gives. docs/http.md describes it."""
NOISE = 16 * MIB
"""Smaller changes of a device's or the process's memory are none: other programs make them all the time."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. `cached` is what its allocator holds without using it. `total` is 0 where it is unknown.

    `free` is None where it is unknown: the driver does not tell, or the process does not have the device `in_use` yet,
    and asking would be a use. `ours` are those of the models in the same snapshot, with ring buffers and retained
    blocks. `name` is what its driver calls it. `state` is that of the other machine whose device it is.
    """

    device: str
    free: int | None
    total: int
    cached: int = 0
    name: str = ""
    ours: int = 0
    state: str = ""
    in_use: bool = True

    @property
    def used(self) -> int | None:
        return None if self.free is None else self.total - self.free

    def words(self) -> str:
        if not self.in_use:
            return f"{self.device} {format_bytes(self.total)}, not in use"
        known = "unknown" if self.free is None else f"{format_bytes(self.free)} of {format_bytes(self.total)} free"
        return f"{self.device} {known}"

    def to_json(self) -> dict[str, Any]:
        """`others` is the rest of what is used: other programs, what is being computed, caches."""
        return {
            "id": self.device,
            "name": self.name,
            "total": self.total or None,
            "in_use": self.in_use,
            "used": self.used,
            "ours": self.ours,
            "others": None if self.used is None else max(0, self.used - self.ours),
            "cached": self.cached,
            **({"state": self.state} if self.state else {}),
        }


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One model. `id` is the same as long as the model lives, and no other model gets it. `standing` is default, keep
    or eject. `file` is its file's name under the host's model folders. `loaded`: whether it is in the host's list of
    loaded models; if not, it is only held for later prompts.

    `device` is where it computes, `loaded_bytes` what the host counts as loaded there. `resting` are the bytes counted
    on each device, `disk` for those that stay in the model file; with `dynamic` (DynamicVRAM), what is loaded is a copy
    of some of those. Of bytes that rest elsewhere, `retained` ones are on the compute device, too, and so is a `ring`
    for the others, except `hoisted` ones, which are computed ahead instead of copied in each step. `plan` is the one
    by which a `placed` model is loaded, `used` when that was last asked for, in seconds since 1970, and `forecast` what
    is known of its steps.
    """

    name: str
    id: str
    device: str
    loaded_bytes: int
    standing: str
    resting: dict[str, int]
    dynamic: bool
    file: str | None = None
    loaded: bool = True
    placed: bool = False
    plan: Plan | None = None
    retained: int = 0
    hoisted: int = 0
    ring: int = 0
    used: float | None = None
    forecast: Forecast | None = None

    def on_device(self, device: str) -> int:
        """All its bytes there, with copies."""
        copies = self.retained + self.ring if device == self.device else 0
        return self.resting.get(device, 0) + copies

    @property
    def streamed(self) -> int:
        """Bytes that are copied to the compute device in each step."""
        away = 0 if self.plan is None else sum(its.bytes for its in self.plan.streamed)
        return max(0, away - self.retained - self.hoisted)

    def to_json(self, *, blocks: bool = True) -> dict[str, Any]:
        """With `blocks`, the name, bytes, home and reason of each block, in order of execution."""
        plan, forecast = self.plan, self.forecast
        told: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "file": self.file,
            "standing": self.standing,
            "placed": self.placed,
            "dynamic": self.dynamic,
            "loaded": self.loaded,
            "compute": self.device,
            "homes": self.resting,
            "retained": self.retained,
            "hoisted": self.hoisted,
            "ring": self.ring,
            "streamed": self.streamed,
            "used": self.used,
            "step": None if forecast is None else step(forecast),
        }
        return {**told, "blocks": [] if plan is None else plan_rows(plan)} if blocks else told


def step(forecast: Forecast) -> dict[str, float | None]:
    """The seconds of a step: by the simulator, and as timed with this plan, if it was."""
    timed = forecast.simulated is not None
    return {"forecast": forecast.simulated if timed else forecast.step, "measured": forecast.step if timed else None}


def told_forecast(step: dict[str, float | None]) -> Forecast:
    """What a snapshot's `step` tells of a forecast."""
    expected, took = step["forecast"], step["measured"]
    assert expected is not None
    if took is None:
        return Forecast(expected, expected, ())
    return Forecast(took, took, (), measured=True, simulated=expected)


def plan_rows(plan: Plan) -> list[list[Any]]:
    """The blocks of a plan in order of execution: name, bytes, home and the word for the reason."""
    return [[its.block, its.bytes, str(its.home), its.reason.value] for its in plan.placements]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bytes per second that were measured from one device to another."""

    source: str
    target: str
    speed: float

    def to_json(self) -> dict[str, Any]:
        return {"from": self.source, "to": self.target, "speed": self.speed}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment. `identifier` says what for, `tag` which moment; `time` is seconds since 1970.

    The last device is the CPU, with the machine's RAM. `held` is how many models are held for later prompts.
    `elsewhere` are the devices of other machines, as these have last told. `frees` is how often the history of frees
    has changed.
    """

    identifier: str
    tag: str
    time: float
    process_bytes: int
    devices: tuple[DeviceMemory, ...]
    models: tuple[ModelMemory, ...] = ()
    held: int = 0
    links: tuple[LinkSpeed, ...] = ()
    elsewhere: tuple[DeviceMemory, ...] = ()
    frees: int = 0

    @property
    def ram(self) -> DeviceMemory:
        return self.devices[-1]

    @property
    def loaded(self) -> list[ModelMemory]:
        return [model for model in self.models if model.loaded]

    @property
    def plans(self) -> dict[str, Plan | None]:
        """The plan of each model by its id."""
        return {model.id: model.plan for model in self.models}

    def line(self) -> str:
        """For people: `free 3 post-unload at 12:03:59: process 1.2 GiB, RAM 12.1 GiB of 23.5 GiB, cuda:0 ...`."""
        parts = [
            f"process {format_bytes(self.process_bytes)}",
            f"RAM {format_bytes(self.ram.used or 0)} of {format_bytes(self.ram.total)}",
            *(its.words() for its in self.devices[:-1]),
        ]
        models = ", ".join(f"{model.name} ({model.standing}, {model.device})" for model in self.loaded) or "none"
        now = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{self.identifier} {self.tag} at {now}: {', '.join(parts)}; loaded: {models}; held: {self.held}"

    def to_json(self, *, blocks: bool = True) -> dict[str, Any]:
        """Plain values. Without `blocks` it is short enough for a log."""
        return {
            "version": VERSION,
            "time": self.time,
            "process": self.process_bytes,
            "held": self.held,
            "devices": [device.to_json() for device in self.devices],
            "models": [model.to_json(blocks=blocks) for model in self.models],
            "links": [link.to_json() for link in self.links],
            "elsewhere": [device.to_json() for device in self.elsewhere],
            "frees": self.frees,
        }

    def json(self) -> str:
        """One line of JSON for a log: everything but the blocks."""
        told = {"identifier": self.identifier, "tag": self.tag, **self.to_json(blocks=False)}
        return json.dumps(told, separators=(",", ":"))

    def figures_to_json(self) -> dict[str, Any]:
        """What changes all the time: the memory of the process, and what is used and cached of each device."""
        devices = [[device.used, device.cached] for device in (*self.devices, *self.elsewhere)]
        return {"time": round(self.time, 2), "process": self.process_bytes, "devices": devices}

    def differs(self, other: Snapshot) -> bool:
        """Whether more is different than the time and the figures."""
        return self._plain() != other._plain()

    def _plain(self) -> tuple[Any, ...]:
        groups = [[replace(its, free=0, cached=0) for its in each] for each in (self.devices, self.elsewhere)]
        return *groups, self.models, self.links, self.held, self.frees

    def far_from(self, other: Snapshot, noise: float) -> bool:
        """Whether a figure differs by more than `noise`. Nothing else does."""
        return any(abs(now - then) > noise for now, then in zip(self._figures(), other._figures(), strict=True))

    def _figures(self) -> list[int]:
        devices = (*self.devices, *self.elsewhere)
        return [self.process_bytes, *(count for its in devices for count in (its.free or 0, its.cached))]


def with_ours(devices: tuple[DeviceMemory, ...], models: tuple[ModelMemory, ...]) -> tuple[DeviceMemory, ...]:
    """The devices, each with the bytes of these models on it."""
    return tuple(replace(device, ours=sum(its.on_device(device.device) for its in models)) for device in devices)
