"""How much the set-up downloads and writes, and whether the disks have room for it."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .pip import cache_folder
from .places import Places
from .problem import Problem

GB = 10**9


@dataclass(frozen=True)
class Build:
    """A build of torch and what the environment with it comes to, measured on Linux.

    `downloads` is what pip fetches when its cache is empty, `environment` the size of `.venv`. `clone` is the most that
    the clone grows by at any time: all of `.venv`, or torch with its libraries and the packages they come from.
    """

    name: str
    downloads: int
    environment: int
    clone: int

    @property
    def sizes(self) -> str:
        return f"{self.downloads / GB:.1f} GB of downloads, {self.environment / GB:.1f} GB on disk"


CPU = Build("CPU", downloads=450 * 10**6, environment=1_900 * 10**6, clone=2_300 * 10**6)
CUDA = Build("CUDA", downloads=3_000 * 10**6, environment=5_900 * 10**6, clone=8_000 * 10**6)
CACHE = 750 * 10**6
"""ComfyUI's archives and the tiny models, in the cache folder."""


def check(places: Places, build: Build) -> None:
    if text := shortage(places, build):
        raise Problem(text)


def shortage(places: Places, build: Build) -> str | None:
    """A sentence about the first disk that has less room than the set-up will take of it; None if all have enough.

    What lies there already is not needed again. Folders on the same disk share its room.
    """
    needs = [(places.root, build.clone - held(places.venv)), (places.cache, CACHE - held(places.cache))]
    if cache := cache_folder(places):
        needs.append((cache, build.downloads - held(cache)))
    disks: dict[int, list[tuple[Path, int]]] = {}
    for folder, size in needs:
        if size > 0:
            disks.setdefault(existing(folder).stat().st_dev, []).append((folder, size))
    for wanted in disks.values():
        free = shutil.disk_usage(existing(wanted[0][0])).free
        need = sum(size for _, size in wanted)
        if free < need:
            names = " and ".join(str(folder) for folder, _ in wanted)
            return (
                f"The disk for {names} has {free / GB:.1f} GB free and the set-up needs {need / GB:.1f} "
                f"with a {build.name} build of torch; free some space there."
            )
    return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def held(folder: Path) -> int:
    """Bytes of all files below a folder that can be seen."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone meanwhile
                total += os.lstat(os.path.join(path, name)).st_size
    return total
