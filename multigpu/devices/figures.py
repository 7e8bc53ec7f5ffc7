"""Measured figures that outlast the process: one small JSON file, which may be deleted at any time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..plan import DeviceId
from .backends import identity

log = logging.getLogger("multigpu")

VERSION = 1
"""Of the way in which figures are measured. A figure that was measured in another way is not used."""
MOST = 256
"""How many figures the file keeps: the latest ones."""


class Kept(Protocol):
    """What figures are kept in."""

    def get(self, name: str) -> float | None: ...

    def put(self, name: str, figure: float) -> None: ...


class NothingKept:
    """Every process measures by itself."""

    def get(self, name: str) -> float | None:
        return None

    def put(self, name: str, figure: float) -> None:
        """Forgotten at once."""


class FigureFile:
    """Figures by name in a JSON file.

    Never raises: a file that is missing or damaged counts as empty, and one that cannot be written stays as it is. It
    is replaced as a whole, so that other processes may read and write it at the same time.
    """

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """`anew`: figures of earlier processes are not used, but replaced."""
        self.path = path
        self._anew = anew

    def get(self, name: str) -> float | None:
        return None if self._anew else self._read().get(name)

    def put(self, name: str, figure: float) -> None:
        figures = self._read()
        figures.pop(name, None)
        figures[name] = figure
        latest = dict([*figures.items()][-MOST:])
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"figures": latest}, indent=1), encoding="utf-8")
            os.replace(new, self.path)
        except OSError as problem:
            log.debug("[MultiGPU] %s is measured again at the next start: %s", name, problem)
            with suppress(OSError):
                new.unlink()

    def _read(self) -> dict[str, float]:
        try:
            figures = json.loads(self.path.read_text(encoding="utf-8"))["figures"]
            return {name: float(figure) for name, figure in figures.items() if 0 < figure < float("inf")}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def figure_name(devices: Iterable[DeviceId]) -> str:
    """The name of a figure of one device, or of the link between two: the same for as long as it can be trusted.

    It has the devices as torch numbers them, and a digest of what they are, of the driver and of torch.
    """
    listed = [*devices]
    facts = "\n".join([str(VERSION), *(identity(device) for device in listed if not device.is_cpu)])
    return f"{' '.join(map(str, listed))} {hashlib.sha256(facts.encode()).hexdigest()[:16]}"
