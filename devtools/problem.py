"""The error for problems of the user's machine: one sentence that says what to do, and exit code 2."""

import errno
from pathlib import Path

from .places import user_cache

UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
FULL = ("No space left on device", "Errno 28", "os error 28")
UNREACHABLE = (
    "Failed to establish a new connection", "name resolution", "ConnectTimeout", "NewConnectionError",
    "Max retries exceeded", "Connection refused", "Network is unreachable", "Read timed out",
    "No matching distribution found", "Could not find a version",
)  # fmt: skip


class Problem(Exception):
    """Something outside this program is in the way. The message is one sentence that says what to do about it."""


def full_disk(where: Path) -> Problem:
    return Problem(
        f"The disk that holds {where} is full; free some space there (python dev.py doctor says how much is needed) "
        "and run the same command again."
    )


def from_os_error(error: OSError) -> Problem | None:
    """The problem behind an OSError, if it is one that the user can fix; None for anything that is our own fault."""
    where = Path(error.filename) if isinstance(error.filename, str) else Path.cwd()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full_disk(where)
    if error.errno not in UNUSABLE:
        return None
    cache = user_cache()
    if error.filename and (where == cache or where in cache.parents or cache in where.parents):
        return Problem(
            f"The cache folder {cache} cannot be used: {where} cannot be written ({error.strerror}); "
            "set MULTIGPU_DEV_CACHE to a folder that you can write to."
        )
    return Problem(
        f"{where} cannot be written ({error.strerror}); make it writable for you, or clone into a folder of your own."
    )


def from_output(text: str, what: str, where: Path) -> Problem:
    """Why `what` could not be installed or made in `where`, from what pip or another program printed."""
    if any(sign in text for sign in FULL):
        return full_disk(where)
    if "DO NOT MATCH THE HASHES" in text:
        return Problem(f"The download of {what} does not have the hash that is expected; do not use it, and report it.")
    if any(sign in text for sign in UNREACHABLE):
        return Problem(
            f"The package index could not be reached to download {what}; "
            "check the network (or pip's index settings) and run the same command again."
        )
    last = (text.strip() or "no output").splitlines()[-1].strip()
    return Problem(f"Getting {what} failed: {last}; fix that and run the same command again.")
