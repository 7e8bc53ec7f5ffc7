"""Calling pip: what it downloads is shown as it comes, and its failures become one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from .console import Console
from .guard import Guarded
from .places import Places
from .problem import from_pip_output

DOWNLOAD = re.compile(r"^\s*(Downloading|Using cached) (\S+)(?<!\.metadata) \(([^)]+)\)")


def pip(places: Places, arguments: Sequence[str | Path], *, what: str, console: Console) -> None:
    """Run the environment's pip. Raises Problem when it fails; `what` is the thing to name then.

    Its temporary files are as large as its downloads and lie in the clone: the system's folder for them may be small.
    """
    scratch = places.dev / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True, exist_ok=True)
    command = [*_command(places), *arguments]
    with Guarded(command, env=_environment() | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))) as child:
        lines = []
        for raw in child.output:
            line = raw.decode(errors="replace").rstrip()
            lines.append(line)
            download = DOWNLOAD.match(line)
            if download:
                verb = "downloading" if download[1] == "Downloading" else "from pip's cache"
                console.detail(f"{verb} {download[2].rpartition('/')[2]} ({download[3]})")
        code = child.wait()
    if code != 0:
        raise from_pip_output("\n".join(lines), what, places.venv)


def cache_folder(places: Places) -> Path | None:
    """Where pip keeps what it downloads; None while there is no environment, and where the user has turned it off."""
    code, text = _answer(places, "cache", "dir")
    return Path(text.splitlines()[-1]) if code == 0 else None


def versions(places: Places, package: str) -> list[str]:
    """The versions that pip can get here, the one it prefers first. Nothing is downloaded. Raises Problem as `pip`."""
    code, text = _answer(places, "index", "versions", "--json", package)
    if code != 0:
        raise from_pip_output(text, package, places.venv)
    return list(json.loads(text.splitlines()[-1])["versions"])


def _answer(places: Places, *question: str) -> tuple[int, str]:
    """Exit code and output of a pip that only tells something; warnings come before the answer."""
    with Guarded([*_command(places), *question], env=_environment()) as child:
        text = child.output.read().decode(errors="replace").strip()
        return child.wait(), text


def _command(places: Places) -> list[str | Path]:
    return [places.python, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _environment() -> dict[str, str]:
    """pip's own settings of the user stay; what would redirect the installation does not."""
    dropped = {"PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH", "PYTHONHOME"}
    return {key: value for key, value in os.environ.items() if key not in dropped}
