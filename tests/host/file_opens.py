"""Which files any process opened: the kernel tells, whatever library did it. Linux only.

A model file that was not opened was not read: loaders map files, so counting read calls would miss them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

AVAILABLE = sys.platform == "linux"

IN_OPEN = 0x20
EVENT = struct.Struct("iIII")


class FileOpens:
    """Counts opens of the files below a folder since the last `take`."""

    def __init__(self, handle: int, folders: dict[int, Path]) -> None:
        self._handle = handle
        self._folders = folders

    def take(self) -> Counter[str]:
        """Path below the watched folder -> how often it was opened, and start anew."""
        opened: Counter[str] = Counter()
        while True:
            try:
                data = os.read(self._handle, 1 << 16)
            except BlockingIOError:
                return opened
            while data:
                watch, _, _, length = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + length].rstrip(b"\0").decode()
                data = data[EVENT.size + length :]
                if name.endswith((".safetensors", ".pt", ".gguf")):
                    opened[(self._folders[watch] / name).as_posix()] += 1


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[FileOpens]:
    """Watch the model files in `folder` and in its direct subfolders; one that no other process opens files in."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    try:
        folders = {}
        for path in [folder, *(entry for entry in folder.iterdir() if entry.is_dir())]:
            number = libc.inotify_add_watch(handle, os.fsencode(path), IN_OPEN)
            if number < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))
            folders[number] = path.relative_to(folder)
        yield FileOpens(handle, folders)
    finally:
        os.close(handle)
