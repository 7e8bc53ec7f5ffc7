"""Where things are: `dev.py` writes to `.venv/` and `.dev/` of the clone and to one cache folder of the user."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


def user_cache() -> Path:
    """Shared by all clones of one user. `MULTIGPU_DEV_CACHE` moves it."""
    named = os.environ.get("MULTIGPU_DEV_CACHE")
    if named:
        return Path(named).absolute()
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "multigpu-dev"


@dataclass(frozen=True)
class Places:
    """The folders of one clone."""

    root: Path
    cache: Path

    @classmethod
    def here(cls) -> Places:
        return cls(root=Path(__file__).resolve().parent.parent, cache=user_cache())

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """The interpreter of the environment that `dev.py` makes."""
        return self.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def dev(self) -> Path:
        return self.root / ".dev"

    @property
    def stamps(self) -> Path:
        return self.dev / "stamps"

    @property
    def requirements(self) -> Path:
        return self.root / "requirements"

    def host_tree(self, version: str) -> Path:
        return self.dev / "hosts" / version

    def frontend(self, version: str) -> Path:
        return self.dev / "frontends" / version
