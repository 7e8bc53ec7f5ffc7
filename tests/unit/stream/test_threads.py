"""Threads that read files."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import CancelledError
from threading import Event

import pytest

from multigpu.stream.threads import Threads

ENDS = """
from multigpu.stream.threads import Threads
from threading import Event

threads, never = Threads(2, "disk"), Event()
for _ in range(10):
    threads.submit(never.wait)
"""


def test_python_ends_although_a_disk_does_not_answer() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=60)


def test_what_has_not_begun_is_cancelled() -> None:
    threads, begun, over = Threads(1, "disk"), Event(), Event()
    first = threads.submit(lambda: (begun.set(), over.wait(), 7)[-1])
    second, third = threads.submit(int, "8"), threads.submit(int, "9")
    begun.wait()
    third.cancel()
    closing = Threads(1, "closing")
    closed = closing.submit(threads.close)
    with pytest.raises(CancelledError):
        second.result(60)
    over.set()
    closed.result(60)
    assert first.result() == 7
    closing.close()


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    threads = Threads(1, "disk")
    wrong, right = threads.submit(int, "x"), threads.submit(int, "8")
    with pytest.raises(ValueError, match="invalid literal"):
        wrong.result()
    assert right.result() == 8
    threads.close()
