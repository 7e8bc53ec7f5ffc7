"""The RAM of this machine, and what of it a container or control group (cgroup) allows this process. Needs no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..errors import InputError

ROOT = Path("/")
"""Tests put another folder in its place."""


def ram() -> tuple[int, int]:
    """Bytes in all, and bytes that can be had without swapping: of the machine, or of a control group if that is less.

    Raises `InputError` where they cannot be found out.
    """
    total, available = _of_the_machine()
    for limit, free in _limits():
        total, available = min(total, limit), min(available, free)
    return total, max(0, min(available, total))


def _of_the_machine() -> tuple[int, int]:
    if find_spec("psutil") is not None:
        memory = importlib.import_module("psutil").virtual_memory()
        return memory.total, memory.available
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise InputError(
            "the size of the RAM cannot be found without psutil; install psutil, or name the devices with --devices"
        ) from None


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and free bytes of each control group that this process is in, as far as they have limits.

    What a group uses includes the pages of files that it has read. Those are given back when they are needed.
    """
    for folder, limit_name, use_name, prefix in _groups():
        try:
            limit = int((folder / limit_name).read_text())  # "max" where there is none
            use = int((folder / use_name).read_text())
            told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(told.get(prefix + name, 0)) for name in ("active_file", "inactive_file"))
        except (OSError, ValueError):
            continue
        yield limit, limit - use + files


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Every group's folder, from the own one up; the names of its files for limit and use; what its figures begin with.

    Above `memory.max` a process is ended; above `memory.high` it is slowed down until it has given RAM back.
    In a container the path may be that outside of it; then the top folder is the container's own group.
    """
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = (
                ROOT / "sys/fs/cgroup",
                [("memory.max", "memory.current", ""), ("memory.high", "memory.current", "")],
            )
        elif "memory" in controllers.split(","):
            top, names = ROOT / "sys/fs/cgroup/memory", [("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")]
        else:
            continue
        own = top / path.lstrip("/")
        folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
        yield from ((folder, *its) for folder in folders for its in names)
