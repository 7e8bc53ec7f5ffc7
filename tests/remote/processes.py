"""The processes, folders and ports that tests have started, and what is left of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
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


class Descendants:
    """What exists now; `left` then names what has come since and does not go away."""

    def __init__(self) -> None:
        self._before = set(self._there())

    def left(self) -> list[str]:
        until(lambda: set(self._there()) <= self._before)
        return sorted(set(self._there()) - self._before)

    def _there(self) -> list[str]:
        """Processes of this test run that have to do with Ray, whoever is their parent now, and our temporary folders.

        Other test runs may be on the same machine; each has a temporary folder of its own, which is in the environment
        of its processes. The ports that processes listen on go with them.
        """
        own = tempfile.gettempdir()
        found = [str(path) for path in Path(own).glob("multigpu-*")]
        for process in psutil.process_iter(["pid", "cmdline", "status", "environ"]):
            words = " ".join(process.info["cmdline"] or [])
            ours = "multigpu.remote" in words or "ray::" in words or "/ray/core/" in words or "/ray/_private/" in words
            if ours and (process.info["environ"] or {}).get("TMPDIR", own) == own:
                found += [f"{process.info['pid']} {words[:80]}"] * (process.info["status"] != psutil.STATUS_ZOMBIE)
        return found


def below(process: int, name: str) -> psutil.Process:
    """The descendant of a process that has this name or command."""
    tree = psutil.Process(process).children(recursive=True)
    return next(each for each in tree if name in " ".join(each.cmdline()))
