"""Output for people: lines, headings, tables, and steps with their elapsed time."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence

QUIET_SECONDS = 15.0
"""A step that takes long says so this often."""


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def detail(text: str) -> None:
    line(f"    {text}")


def heading(text: str) -> None:
    line(f"\n{text}\n{'-' * len(text)}")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line("".join(f"  {cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Say that something begins, that it still goes on, and how long it took."""
    line(f"  {title}")
    started, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(QUIET_SECONDS):
            detail(f"working, {time.monotonic() - started:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        over.set()
    detail(f"done in {time.monotonic() - started:.0f} s")
