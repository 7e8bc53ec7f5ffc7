"""Measures how fast a model file is read, in the way that streaming reads it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from . import file_lane, file_reader
from .pages import PagedLeaf

SAMPLE = 256 << 20
"""Bytes that are read at most, from all over the file."""
LONGEST = 0.5
"""Seconds. After these no further part is read."""


def reading_speed(leaves: Sequence[PagedLeaf], *, cached: bool) -> float | None:
    """Bytes per second from a file into RAM, from the system's cache or not; None where that cannot be measured."""
    parts = _parts(leaves)
    if not parts or (not cached and not hasattr(os, "posix_fadvise")):
        return None
    try:
        if cached:
            _read(parts)
        else:
            for leaf, begin, count in parts:
                os.posix_fadvise(leaf.descriptor, leaf.offset + begin, count, os.POSIX_FADV_DONTNEED)
        return _read(parts)
    except OSError:
        return None


def _parts(leaves: Sequence[PagedLeaf]) -> list[tuple[PagedLeaf, int, int]]:
    """Pieces as streaming reads them, evenly from the whole file."""
    most = file_lane.PART
    every = [(leaf, begin, min(most, leaf.nbytes - begin)) for leaf in leaves for begin in range(0, leaf.nbytes, most)]
    whole = [part for part in every if part[2] == most] or every
    return whole[:: max(1, len(whole) * most // SAMPLE)]


def _read(parts: Sequence[tuple[PagedLeaf, int, int]]) -> float:
    """Bytes per second of reading these parts, or as many of them as time allows."""
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(file_reader.THREADS):
        buffers.put(memoryview(bytearray(file_lane.PART)))
    began = time.perf_counter()

    def read(part: tuple[PagedLeaf, int, int]) -> int:
        if time.perf_counter() - began > LONGEST:
            return 0
        leaf, begin, count = part
        buffer = buffers.get()
        leaf.read_into(buffer[:count], begin)
        buffers.put(buffer)
        return count

    with ThreadPoolExecutor(file_reader.THREADS, "multigpu-measure") as pool:
        count = sum(pool.map(read, parts))
    return count / (time.perf_counter() - began)
