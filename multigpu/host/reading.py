"""Progress while the host's own loader reads files.

The loader does not report how far it is, so a thread watches how much this process has read. With DynamicVRAM files are
read later, as they are needed: then the bar goes from 0 to 100 when the loader returns.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
from comfy.utils import ProgressBar

from ..lifecycle.ledger import stamp
from ..telemetry.reading import Reading
from .progress import STEPS

PERIOD = 0.2
"""Seconds between two samples."""

THREAD = "MultiGPU reading"

WATCHED: contextvars.ContextVar[bool] = contextvars.ContextVar("multigpu_watched", default=False)
"""Whether a bar already shows the reading in this context."""


@contextmanager
def reading(paths: Iterable[str]) -> Iterator[None]:
    """Move the progress bar of the node that runs, while the `with` block reads the files.

    Does nothing without files, or inside another such block. The watching thread ends with the block, however that
    ends. A loader cannot be stopped halfway: when the user interrupts, the block runs to its end, and then the host's
    exception is raised here.
    """
    total = sum(max(0, size) for _, size, _ in map(stamp, set(paths)))
    if not total or WATCHED.get():
        yield
        return
    bar = ProgressBar(STEPS)
    bar.update_absolute(0)
    watch, watched = _Watch(bar, total), WATCHED.set(True)
    try:
        yield
    finally:
        watch.stop()
        WATCHED.reset(watched)
    if watch.raised is not None:
        raise watch.raised
    bar.update_absolute(STEPS)


class _Watch:
    """A thread that watches this process until it is stopped or the bar raises. It runs in the context of the node."""

    def __init__(self, bar: ProgressBar, total: int) -> None:
        self.raised: BaseException | None = None
        self._bar = bar
        self._process = psutil.Process()
        self._reading = Reading(total, bytes_read(self._process))
        self._stopped = threading.Event()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._look,), name=THREAD, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            while not self._stopped.wait(PERIOD):
                self._bar.update_absolute(self._reading.percent(bytes_read(self._process)))
        except BaseException as raised:  # noqa: BLE001  the host's interruption is one; raised again by `reading`
            self.raised = raised


def bytes_read(process: psutil.Process) -> int:
    """Bytes that a process has read with read calls, plus those of mapped files that are in its memory.

    Only Linux counts mapped files separately; elsewhere all memory of the process is used instead.
    """
    memory = process.memory_info()
    mapped = int(getattr(memory, "shared", memory.rss))
    try:
        told = process.io_counters()
    except (AttributeError, OSError, RuntimeError, ValueError, psutil.Error):  # not on macOS, nor in some containers
        return mapped
    return mapped + int(getattr(told, "read_chars", told.read_bytes))
