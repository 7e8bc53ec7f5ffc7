"""What the last frees did: which models left, which stayed and why, and how many bytes came back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .snapshot import Snapshot

KEPT = 20
"""How many frees are remembered."""
VERSION = 2
"""Of the form that `FreeHistory.to_json` gives."""


@dataclass(frozen=True, slots=True)
class Fate:
    """A model that left or stayed, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Freed:
    """One free. `time` is seconds since 1970; `free_memory`: the executor's cached outputs were to be dropped, too."""

    time: float
    free_memory: bool
    ejected: tuple[Fate, ...]
    retained: tuple[Fate, ...]
    returned: dict[str, int] = field(default_factory=dict)

    def words(self) -> str:
        """Which models left, which stayed, and why."""
        parts = [
            f"{', '.join(its.name for its in fates if its.reason == reason)} {what} ({reason})"
            for fates, what in ((self.ejected, "unloaded"), (self.retained, "stays"))
            for reason in dict.fromkeys(its.reason for its in fates)
        ]
        return "; ".join(parts) or "no model is loaded"

    def to_json(self) -> dict[str, Any]:
        return {
            "time": self.time,
            "free_memory": self.free_memory,
            "ejected": [{"name": its.name, "reason": its.reason} for its in self.ejected],
            "retained": [{"name": its.name, "reason": its.reason} for its in self.retained],
            "returned": self.returned,
        }


class FreeHistory:
    """The last frees, newest first. Written by the prompt worker, read on any thread."""

    def __init__(self) -> None:
        self._frees: tuple[Freed, ...] = ()
        self._before: Snapshot | None = None
        self.changes = 0
        """Counts them, so that nobody has to compare histories."""

    def begin(self, before: Snapshot, freed: Freed) -> None:
        """A free that found memory so."""
        self._before = before
        self._frees = (freed, *self._frees[: KEPT - 1])
        self.changes += 1

    def note(self, after: Snapshot) -> None:
        """Memory is so now, at a later moment of the last free."""
        if self._before is not None and self._frees:
            newest = replace(self._frees[0], returned=returned(self._before, after))
            self._frees = (newest, *self._frees[1:])
            self.changes += 1

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "frees": [freed.to_json() for freed in self._frees]}


def returned(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Bytes that came back by device: of accelerators what is free now and was not, of the RAM those of the process.

    Devices whose driver does not tell their memory are left out.
    """
    then = {device.device: device.free for device in before.devices if device.free is not None}
    now = {device.device: device.free for device in after.devices if device.free is not None}
    back = {device: max(0, free - then[device]) for device, free in now.items() if device in then}
    return {**back, after.ram.device: max(0, before.process_bytes - after.process_bytes)}
