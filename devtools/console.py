"""Output for people: headings, tables, and steps with their elapsed time, updated in place only on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

QUIET_SECONDS = 15.0
"""Without a terminal, a step that takes long says so this often."""


class Console:
    """Writes to one stream. The thread of a step and the one that shows the elapsed time may use it at once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._ticker_shown = False

    def line(self, text: str = "") -> None:
        with self._lock:
            self._wipe()
            self._write(text + "\n")

    def heading(self, text: str) -> None:
        self.line()
        self.line(text)
        self.line("-" * len(text))

    def table(self, rows: Sequence[Sequence[str]], indent: str = "  ") -> None:
        """Left-aligned columns, two spaces apart."""
        if not rows:
            return
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line((indent + "  ".join(cells)).rstrip())

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Say that something begins, that it still goes on, and how long it took."""
        self.line(f"  {title}")
        started = time.monotonic()
        over = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(started, over), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()
        self.line(f"    done in {time.monotonic() - started:.0f} s")

    def detail(self, text: str) -> None:
        self.line(f"    {text}")

    def _tick(self, started: float, over: threading.Event) -> None:
        while not over.wait(0.5 if self._live else QUIET_SECONDS):
            elapsed = f"    working, {time.monotonic() - started:.0f} s"
            if not self._live:
                self.line(elapsed)
                continue
            with self._lock:
                self._write("\r" + elapsed)
                self._ticker_shown = True
        with self._lock:
            self._wipe()

    def _wipe(self) -> None:
        if self._ticker_shown:
            self._write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            self._ticker_shown = False

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
