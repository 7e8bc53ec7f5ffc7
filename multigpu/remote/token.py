"""The token of a cluster, in a file that only its owner can read. It is the right to run code on all its machines."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ClusterUnavailable

VARIABLE = "RAY_AUTH_TOKEN_PATH"


def token_file(environment: Mapping[str, str]) -> Path:
    """Where the token is: in the file that Ray's own variable names, or else in a folder of ours."""
    return Path(environment.get(VARIABLE) or Path.home() / ".multigpu" / "ray_token")


def make_token(path: Path) -> bool:
    """Have a token; True if it was made now. Nobody else can read the file, from the moment that it exists."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return True


def check_token(path: Path) -> None:
    """Raise `ClusterUnavailable` unless the file has a token that only its owner can read."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterUnavailable(
            f"the token of the Ray cluster cannot be read from {path} ({type(error).__name__}); copy that file from "
            f"the machine that runs `python -m multigpu worker --head-here`, or name another with {VARIABLE}"
        ) from None
    if sys.platform != "win32" and mode & 0o077:
        raise ClusterUnavailable(f"others can read the token in {path}, so it is not secret; chmod 600 {path}")
    if len(text) < 32:
        raise ClusterUnavailable(f"{path} has {len(text)} characters, but a token has at least 32; make a longer one")
