"""Steps that may be killed at any point: results are complete or absent, and stamped with a hash of their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def fingerprint(*parts: str | Path) -> str:
    """A hash of texts and of files' contents, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.part-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a link but not what it leads to. Nothing there is fine too."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    if os.name == "nt" and path.is_dir() and os.path.realpath(path) != real:
        path.rmdir()  # a junction: only the link goes
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Stamp:
    """Says whether a step was finished with the same inputs."""

    def __init__(self, folder: Path, name: str, inputs: str) -> None:
        self._path = folder / name
        self._inputs = inputs

    def holds(self) -> bool:
        return self._path.is_file() and self._path.read_bytes() == self._inputs.encode()

    def write(self) -> None:
        write_text(self._path, self._inputs)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the block ends without an error.

    Whatever lay at `target` is replaced. What a killed run left beside it is removed first; hold a lock when several
    processes may make the same folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.part-*"):
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.part-"))
    try:
        part.chmod(0o755)
        yield part
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def only_one(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time into the block. The operating system lets go of the lock when its holder dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+b") as file:
        if not _try_lock(file.fileno()):
            on_wait()
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
