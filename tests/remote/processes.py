"""The processes, folders and ports that tests have started, and what is left of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE = 120.0
"""Seconds. Long, because a ComfyUI may have to start on a busy machine meanwhile."""


def until(true: Callable[[], object]) -> bool:
    """Whether it becomes true before long."""
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


BROWSER = ("playwright", ".org.chromium", ".com.google", "org.chromium")
"""How names in the temporary folder begin that are those of a browser, which lives as long as the session."""


class Descendants:
    """What exists now; `left` then names what has come since and does not go away."""

    def __init__(self) -> None:
        self._before = self._there()

    def left(self) -> list[str]:
        until(lambda: self._there() <= self._before)
        return sorted(self._there() - self._before)

    def _there(self) -> set[str]:
        """Python's and Ray's processes of this test run, whoever is their parent now; the ports on which they listen;
        and everything in the temporary folder.

        Other test runs may be on the same machine; each has a temporary folder of its own, which is in the environment
        of its processes. Some of Ray's have written over theirs.
        """
        own = tempfile.gettempdir()
        found = {str(path) for path in Path(own).iterdir() if not path.name.startswith(BROWSER)}
        for process in psutil.process_iter(["pid", "cmdline", "status", "environ"]):
            words = " ".join(process.info["cmdline"] or [])
            python = Path(words.partition(" ")[0]).name.startswith("python")
            rays = "multigpu.remote" in words or "ray::" in words or "/ray/core/" in words or "/ray/_private/" in words
            folder = (process.info["environ"] or {}).get("TMPDIR", own if rays else "")
            if (rays or python) and folder == own and process.info["status"] != psutil.STATUS_ZOMBIE:
                name = f"{process.info['pid']} {words[:80]}"
                found |= {name, *(f"port {port} of {name}" for port in listening(process))}
        return found


def listening(process: psutil.Process) -> list[int]:
    """The ports on which it listens."""
    with suppress(psutil.Error):
        every = process.net_connections("inet")
        return [each.laddr.port for each in every if each.status == psutil.CONN_LISTEN]
    return []


def below(process: int, name: str) -> psutil.Process:
    """The descendant of a process that has this name or command."""
    tree = psutil.Process(process).children(recursive=True)
    return next(each for each in tree if name in " ".join(each.cmdline()))
