"""When RAM runs short between prompts: what to drop, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Release(Enum):
    """What can be dropped, in this order. The value is what the log says."""

    CACHES = "the executor's cached outputs and models nobody asked to keep"
    RETAINED = "models held for the next prompt"
    PINNED = "pinned models"


ORDER = tuple(Release)


@dataclass
class Pressure:
    """Decides what to release each time it is told the fraction of RAM in use, from 0 to 1.

    While more than `limit` is in use, each call of `next_release` goes one step further in the order. After the last
    step, or once use has fallen to the limit, nothing is released until use falls below `limit` - `hysteresis`: memory
    that other programs hold must not make us free the same things after every prompt.
    """

    limit: float
    hysteresis: float = 0.05
    _next: int = field(default=0, init=False)
    _resting: bool = field(default=False, init=False)

    def next_release(self, used: float) -> Release | None:
        """The next thing to release, or None if there is enough room or nothing is left to release."""
        if used < self.limit - self.hysteresis:
            self._next, self._resting = 0, False
            return None
        if used <= self.limit:
            self._resting = self._next > 0
            return None
        if self._resting or self._next >= len(ORDER):
            return None
        self._next += 1
        return ORDER[self._next - 1]
