"""Which block runs next: learnt by watching, never assumed. PURE.

A model's blocks may run conditionally, twice, or in another order than declared. The predictor keeps the sequence of
uses it has seen and a cursor into it, one period behind the present: what followed the last time is what is expected
to follow now. There is no notion of a pass or a step, so CFG pairs, loops and one-shot encoders need no special case.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

_CONTEXT = 16
"""How many earlier uses are compared when a block was seen in several places."""

_PLACES = 32
"""How many places of a block are remembered."""


class UsePredictor:
    """Predicts the next uses of blocks (small integers) from the uses seen so far.

    Positions are absolute: they stay valid while old history is forgotten.
    """

    def __init__(self, guess: Iterable[int] = (), keep: int = 1 << 16) -> None:
        """`guess` is an order to expect before anything was seen; a wrong guess costs misses, never correctness."""
        self._history: list[int] = list(guess)
        self._base = 0
        self._keep = keep
        self._places: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_PLACES))
        for position, block in enumerate(self._history):
            self._places[block].append(position)
        self._cursor = -1

    def expected(self, position: int) -> int | None:
        """The block expected at `position`; None beyond what is known."""
        index = position - self._base
        return self._history[index] if 0 <= index < len(self._history) else None

    @property
    def next_position(self) -> int:
        """Where the use after the latest one is expected."""
        return self._cursor + 1

    def used(self, block: int) -> bool:
        """Record one use. False if it was not the expected one (the cursor then moves to the best match)."""
        hit = self.expected(self._cursor + 1) == block
        self._cursor = self._cursor + 1 if hit else self._best_match(block)
        position = self._base + len(self._history)
        self._history.append(block)
        self._places[block].append(position)
        if not hit and self._cursor < 0:
            self._cursor = position
        if len(self._history) > 2 * self._keep:
            self._forget(self._keep)
        return hit

    def _best_match(self, block: int) -> int:
        """The remembered place of `block` whose past looks most like the present; -1 if there is none."""
        best, best_score = -1, -1
        for position in self._places[block]:
            score = self._common_past(position)
            if score >= best_score:
                best, best_score = position, score
        return best

    def _common_past(self, position: int) -> int:
        """How many uses just before `position` equal the latest uses."""
        index, end = position - self._base, len(self._history)
        for length in range(_CONTEXT):
            back = length + 1
            if index - back < 0 or self._history[index - back] != self._history[end - back]:
                return length
        return _CONTEXT

    def _forget(self, count: int) -> None:
        """Drop the oldest `count` uses; the cursor is a period behind the end, so it must survive."""
        count = min(count, self._cursor - self._base - _CONTEXT)
        if count <= 0:
            return
        del self._history[:count]
        self._base += count
        for places in self._places.values():
            while places and places[0] < self._base:
                places.popleft()
