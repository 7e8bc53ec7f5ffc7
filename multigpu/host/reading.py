"""Progress while the host's own loader reads files.

The loader does not report how far it is. It maps the files into memory, and Linux tells how much of each is there, so a
thread looks from time to time. On other systems, and with DynamicVRAM, where files are read later, as they are needed,
the bar goes from 0 to 100 when the loader returns.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from comfy.utils import ProgressBar

from .progress import STEPS

PERIOD = 0.2
"""Seconds between two looks."""

THREAD = "MultiGPU reading"
MAPPINGS = "/proc/self/smaps"

WATCHED: contextvars.ContextVar[bool] = contextvars.ContextVar("multigpu_watched", default=False)
"""Whether a bar already shows the reading in this context."""


@contextmanager
def reading(paths: Iterable[str]) -> Iterator[None]:
    """Move the progress bar of the node that runs, while the `with` block reads the files.

    Does nothing without files, or inside another such block. The watching thread ends with the block, however that
    ends. A loader cannot be stopped halfway: when the user interrupts, the block runs to its end, and then the host's
    exception is raised here.
    """
    files = {os.path.realpath(path) for path in paths}
    total = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    if not total or WATCHED.get():
        yield
        return
    bar = ProgressBar(STEPS)
    bar.update_absolute(0)
    watch, watched = _Watch(bar, files, total), WATCHED.set(True)
    try:
        yield
    finally:
        watch.stop()
        WATCHED.reset(watched)
    if watch.raised is not None:
        raise watch.raised
    bar.update_absolute(STEPS)


class _Watch:
    """A thread that looks until it is stopped or the bar raises. It runs in the context of the node."""

    def __init__(self, bar: ProgressBar, files: Collection[str], total: int) -> None:
        self.raised: BaseException | None = None
        self._bar, self._files, self._total = bar, files, total
        self._before = bytes_mapped(files)
        self._stopped = threading.Event()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=THREAD, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        shown = 0
        try:
            while not self._stopped.wait(PERIOD):
                read = bytes_mapped(self._files) - self._before
                shown = max(shown, min(STEPS - 1, STEPS * read // self._total))  # only the loader knows when it is done
                self._bar.update_absolute(shown)
        except BaseException as raised:  # noqa: BLE001  the host's interruption is one; raised again by `reading`
            self.raised = raised


def bytes_mapped(files: Collection[str]) -> int:
    """Bytes of these files that are in this process's memory; 0 where the system does not tell."""
    count, ours = 0, False
    with suppress(OSError), open(MAPPINGS, encoding="utf-8", errors="replace") as mappings:
        for line in mappings:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):  # a mapping begins: addresses, rights, offset, device, inode, path
                ours = "/" + line.rstrip("\n").partition("/")[2] in files
            elif ours and name == "Rss:":
                count += 1024 * int(rest.split()[0])
    return count
