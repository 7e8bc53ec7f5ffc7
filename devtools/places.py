"""Where things are: `dev.py` writes to `.venv/` and `.dev/` of the clone and to one cache folder of the user."""

import os
from dataclasses import dataclass
from pathlib import Path


def user_cache() -> Path:
    """Shared by all clones of one user. `MULTIGPU_DEV_CACHE` moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MULTIGPU_DEV_CACHE") or Path(base, "multigpu-dev")).absolute()


def python_in(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


@dataclass(frozen=True)
class Places:
    """The folders of one clone."""

    root: Path
    cache: Path

    @classmethod
    def here(cls) -> "Places":
        return cls(root=Path(__file__).resolve().parent.parent, cache=user_cache())

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """The interpreter of the environment that `dev.py` makes."""
        return python_in(self.venv)

    @property
    def dev(self) -> Path:
        return self.root / ".dev"

    @property
    def requirements(self) -> Path:
        return self.root / "requirements"

    def host_tree(self, version: str) -> Path:
        return self.dev / "hosts" / version
