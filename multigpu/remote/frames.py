"""Messages over a pipe between two processes of one machine: a number, then parts of which only the length is said.

The first part is a JSON object, the others are bytes that nobody reads on the way.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from .link import Buffer
from .memory import room

_HEAD = struct.Struct("<QI")
_MOST_PARTS = 1_000_000
_PIPE_BYTES = 1 << 20
"""Room in a pipe, where that can be chosen: with the usual 64 KiB, large messages take several times as long."""


def widen(pipe: BinaryIO) -> None:
    """Give a pipe more room, if the system lets us."""
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class Writer:
    """Writes frames whole, whichever thread writes them."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def write(self, number: int, about: dict[str, Any], parts: Sequence[Buffer] = ()) -> None:
        """Raises OSError or ValueError when the pipe is closed."""
        views = [memoryview(part).cast("B") for part in (json.dumps(about).encode(), *parts)]
        sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
        with self._lock:
            self._whole(memoryview(_HEAD.pack(number, len(views)) + sizes))
            for view in views:
                self._whole(view)

    def _whole(self, left: memoryview) -> None:
        while left:
            left = left[self._pipe.write(left) :]


def read(pipe: BinaryIO) -> tuple[int, dict[str, Any], list[memoryview]] | None:
    """The next frame; None when the other side has closed the pipe, even in the middle of one."""
    head = _exactly(pipe, _HEAD.size)
    if head is None:
        return None
    number, count = _HEAD.unpack(head)
    if not 1 <= count <= _MOST_PARTS:
        return None
    sizes = _exactly(pipe, 8 * count)
    parts = [] if sizes is None else [_exactly(pipe, size) for size in struct.unpack(f"<{count}Q", sizes)]
    whole = [part for part in parts if part is not None]
    if len(whole) < count:
        return None
    return number, json.loads(bytes(whole[0])), whole[1:]


def _exactly(pipe: BinaryIO, size: int) -> memoryview | None:
    left = data = room(size)
    while left:
        count = pipe.readinto(left)  # type: ignore[attr-defined]
        if not count:
            return None
        left = left[count:]
    return data
