"""Calling pip: what it downloads is shown as it comes, and its failures become one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .console import Console
from .guard import Guarded
from .problem import from_pip_output

DOWNLOAD = re.compile(r"^\s*(Downloading|Using cached) (\S+)(?<!\.metadata) \(([^)]+)\)")


def pip(python: Path, arguments: Sequence[str | Path], *, what: str, console: Console) -> None:
    """Run pip with the interpreter `python`. Raises Problem when it fails; `what` is the thing to name then."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with Guarded(command, env=_environment()) as child:
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
        raise from_pip_output("\n".join(lines), what, python.parent)


def _environment() -> dict[str, str]:
    """pip's own settings of the user stay; what would redirect the installation does not."""
    dropped = {"PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH", "PYTHONHOME"}
    return {key: value for key, value in os.environ.items() if key not in dropped}
