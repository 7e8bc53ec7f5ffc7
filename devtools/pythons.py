"""The other supported Pythons of this machine. The unit tests that do without torch run with each of them."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from . import console, guard
from .environment import pip
from .places import Places, python_in
from .problem import from_output
from .steps import fingerprint, make_once

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


def others() -> dict[str, Path | None]:
    """Every supported version but that of this Python, with an interpreter if there is one."""
    own = ".".join(map(str, sys.version_info[:2]))
    return {version: find(version) for version in SUPPORTED if version != own}


def find(version: str) -> Path | None:
    """An interpreter of this version from PATH, or else the newest one in pyenv's folder. None if there is none.

    Each is asked: in PATH, pyenv has commands for all of its versions that fail unless the version is chosen there.
    """
    return next((path for path in _candidates(version) if guard.run([path, "-I", "-c", ASK]) == (0, version)), None)


def prepare(places: Places) -> dict[str, Path]:
    """Have an environment in `.dev` for each of the other Pythons; returns their interpreters. Says which are missing.

    They have no torch: pip's default on Linux is its CUDA build, 5 GB for each of them.
    """
    found = others()
    if missing := [version for version in found if found[version] is None]:
        console.line(f"  Python {', '.join(missing)}: not found, so no unit tests run with it")
    return {
        version: environment_for(version, python, places) for version, python in found.items() if python is not None
    }


def environment_for(version: str, python: Path, places: Places) -> Path:
    """Works in another folder than it was made in, because nothing but its Python is started from there."""
    target, pins = places.dev / f"python-{version}", places.requirements / "pythons" / "packages.txt"
    what = f"the packages for the unit tests with Python {version}"

    def make(part: Path) -> None:
        code, text = guard.run([python, "-m", "venv", "--without-pip", part])
        if code != 0:
            raise from_output(text, f"an environment for Python {version}", part)
        pip(places, ["--python", python_in(part), "install", "--no-deps", "--require-hashes", "-r", pins], what=what)

    title = f"Installing {what} (20 MB)"
    make_once(target, fingerprint(str(python), pins), make, places.dev / "lock", f"Python {version}", title)
    return python_in(target)


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        if path := shutil.which(f"python{version}", path=folder):
            yield Path(path).absolute()
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    numbers = {path: re.fullmatch(rf"{re.escape(version)}\.(\d+)", path.name) for path in pyenv.glob(f"{version}.*")}
    for path in sorted((path for path in numbers if numbers[path]), key=lambda path: -int(numbers[path][1])):
        yield python_in(path)
