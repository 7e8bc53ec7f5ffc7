"""Take synchronisation out of ComfyUI's own weight offloading, to see that the race detector notices."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management as model_management


class Sabotage:
    """At most one at a time; `choose(None)` restores ComfyUI."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def choose(self, name: str | None) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        if name == "compute does not wait for copies":
            self._compute_does_not_wait()
        elif name == "copies do not wait for compute":
            self._copies_do_not_wait()
        elif name is not None:
            raise ValueError(f"there is no sabotage called {name!r}")

    def _compute_does_not_wait(self) -> None:
        original = model_management.sync_stream
        model_management.sync_stream = lambda device, stream: None
        self._undo.append(lambda: setattr(model_management, "sync_stream", original))

    def _copies_do_not_wait(self) -> None:
        for streams in model_management.STREAMS.values():
            for stream in streams:
                stream.wait_stream = lambda other: None
                self._undo.append(lambda stream=stream: delattr(stream, "wait_stream"))
