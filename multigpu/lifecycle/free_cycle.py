"""The steps of one free, in the order in which the host's prompt worker takes them.

    NONE -> UNLOADING    `unload_all_models` is called
         -> UNLOADED     it is done; the executor may be reset
         -> COLLECTED    the worker collects garbage
         -> NONE         `soft_empty_cache` is called

A free inside a prompt, or after an out-of-memory error, has no such end: after UNLOADING it is over. The end belongs to
the thread that began, because other threads may collect garbage and empty caches meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

Kept = TypeVar("Kept")

OLDEST_GENERATION = 2
"""A full garbage collection is one of this generation."""


class Phase(Enum):
    NONE = auto()
    UNLOADING = auto()
    UNLOADED = auto()
    COLLECTED = auto()


@dataclass
class FreeCycle(Generic[Kept]):
    """Follows one free at a time. `kept` are the models that must be there at its end."""

    phase: Phase = Phase.NONE
    kept: Sequence[Kept] = ()
    chosen: bool = False
    """Whether keep, eject or default was chosen for a model since the last free."""
    placed: bool = False
    """Whether a placed model was in memory since the last free that ran to its end: its device may have cached bytes
    of it, also if the host has dropped it since."""
    _count: int = 0
    _thread: int = field(default=0)

    @property
    def name(self) -> str:
        return f"free {self._count}"

    def begin(self) -> str:
        """Models are being unloaded. Returns the name of this free."""
        self._count += 1
        self.phase, self.chosen = Phase.UNLOADING, False
        return self.name

    def unloaded(self, thread: int, kept: Sequence[Kept]) -> None:
        """Models are unloaded; the worker will collect garbage and empty caches."""
        self.phase, self._thread, self.kept = Phase.UNLOADED, thread, kept

    def stop(self) -> None:
        """Nothing more is awaited of this free."""
        self.phase, self.kept = Phase.NONE, ()

    def collects(self, thread: int, generation: int) -> bool:
        """Whether a garbage collection that begins is that of this free."""
        if self.phase is not Phase.UNLOADED or generation < OLDEST_GENERATION or thread != self._thread:
            return False
        self.phase = Phase.COLLECTED
        return True

    def ends(self, thread: int) -> bool:
        """Whether emptying the caches now is the end of this free."""
        return self.phase is Phase.COLLECTED and thread == self._thread
