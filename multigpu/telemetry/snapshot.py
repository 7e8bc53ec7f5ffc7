"""One look at memory, as plain data."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from ..units import format_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. `cached` is what its allocator holds without using it. `total` is 0 where it is unknown."""

    device: str
    free: int
    total: int
    cached: int = 0

    def words(self) -> str:
        return f"{format_bytes(self.free)} of {format_bytes(self.total)} free" if self.total else "unknown"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One loaded model. `standing` is default, keep or eject; `id` is that of the inner model.

    `device` is where it computes, `loaded_bytes` what the host counts as loaded there. `resting` are the bytes counted
    on each device; with `dynamic` (DynamicVRAM) those of the CPU are mapped from the file, and what is loaded is a copy
    of some of them.
    """

    name: str
    id: int
    device: str
    loaded_bytes: int
    standing: str
    resting: dict[str, int]
    dynamic: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment. `identifier` says what for, `tag` which moment; `time` is seconds since 1970."""

    identifier: str
    tag: str
    time: float
    process_bytes: int
    ram_used: int
    ram_total: int
    devices: tuple[DeviceMemory, ...]
    models: tuple[ModelMemory, ...]
    anchors: int

    def line(self) -> str:
        """For people: `free 3 post-unload at 12:03:59: process 1.2 GiB, RAM 12.1 GiB of 23.5 GiB, cuda:0 ...`."""
        parts = [
            f"process {format_bytes(self.process_bytes)}",
            f"RAM {format_bytes(self.ram_used)} of {format_bytes(self.ram_total)}",
            *(f"{its.device} {its.words()}" for its in self.devices),
        ]
        models = ", ".join(f"{model.name} ({model.standing}, {model.device})" for model in self.models) or "none"
        now = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{self.identifier} {self.tag} at {now}: {', '.join(parts)}; loaded: {models}; held: {self.anchors}"

    def json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(asdict(self), separators=(",", ":"))
