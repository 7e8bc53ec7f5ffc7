"""Steps that may be killed at any point: a result is whole or absent, and knows what it was made from."""

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import console

STAMP = "made-from"
"""The file in a finished folder that holds the fingerprint of what the folder was made from."""


def fingerprint(*parts: str | Path) -> str:
    """A hash of texts and of files' contents, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def is_made(folder: Path, inputs: str) -> bool:
    """Whether a folder is finished and was made from the same inputs."""
    return (folder / STAMP).is_file() and (folder / STAMP).read_text(encoding="utf-8") == inputs


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a link but not what it leads to. Nothing there is fine too."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # which of them, depends on the system
        shutil.rmtree(path)


def make_once(target: Path, inputs: str, make: Callable[[Path], None], lock: Path, name: str, title: str) -> None:
    """Have the folder `target`, made from `inputs`; if it is there already, only say that `name` is ready.

    `make` fills an empty folder beside `target` that takes its place when it is whole. Of several processes one makes
    it, and the others wait.
    """
    part = target.with_name(f".{target.name}.part")
    with only_one(lock):
        if is_made(target, inputs):
            console.line(f"  {name}: ready")
            return
        with console.step(title):
            remove(part)  # of a run that was killed
            part.mkdir(parents=True)
            try:
                make(part)
                (part / STAMP).write_text(inputs, encoding="utf-8")
                remove(target)
                part.rename(target)
            finally:
                remove(part)


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time into the block. The operating system lets go of the lock when its holder dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+b") as file:
        if not _try_lock(file.fileno()):
            console.line("  Waiting for another dev.py to finish its set-up")
            while not _try_lock(file.fileno()):
                time.sleep(0.2)
        yield


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 0, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
