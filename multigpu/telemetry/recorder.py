"""Takes snapshots, keeps the last of them, and logs them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from .snapshot import Snapshot

KEPT = 256
"""How many snapshots are kept; older ones are dropped."""

Source = Callable[[str, str], Snapshot]
"""Takes a snapshot: identifier, tag."""


class Recorder:
    """The history of one process."""

    def __init__(self, source: Source, log: logging.Logger) -> None:
        self._source = source
        self._log = log
        self._history: deque[Snapshot] = deque(maxlen=KEPT)

    def take(self, identifier: str, tag: str, *, level: int = logging.INFO, as_json: bool = False) -> Snapshot:
        """Take, keep and log a snapshot: a line for people, or with `as_json` one line of JSON."""
        snapshot = self._source(identifier, tag)
        self._history.append(snapshot)
        if self._log.isEnabledFor(level):
            self._log.log(level, "[MultiGPU] %s", snapshot.json() if as_json else snapshot.line())
        return snapshot

    def history(self, last: int | None = None) -> list[Snapshot]:
        """Oldest first; at most the `last` ones."""
        kept = list(self._history)
        return kept if last is None else kept[len(kept) - min(last, len(kept)) :]
