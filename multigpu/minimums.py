"""The oldest Python and torch that the pack runs with. Python 3.7 can read this file, and so say what is needed."""

from __future__ import annotations

import logging
import re
import sys

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 4)
"""As in pyproject.toml."""


def too_old(python: tuple[int, ...], torch: str | None) -> str | None:
    """Why the pack cannot run with these versions, in one sentence; None if it can.

    `torch` is None where there is none. A version that does not begin with two numbers counts as new enough.
    """
    if python[:2] < OLDEST_PYTHON:
        return _sentence("Python", _dotted(python), _dotted(OLDEST_PYTHON), "run ComfyUI with a newer one")
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        return _sentence("torch", str(torch), _dotted(OLDEST_TORCH), "update it in the Python that runs ComfyUI")
    return None


def refused() -> bool:
    """Whether Python or torch is too old for the pack; then one error is logged.

    Imports no torch: inside ComfyUI it has been imported before any pack.
    """
    problem = too_old(sys.version_info[:3], getattr(sys.modules.get("torch"), "__version__", None))
    if problem is not None:
        logging.getLogger("multigpu").error("[MultiGPU] %s", problem)
    return problem is not None


def _sentence(name: str, found: str, needed: str, advice: str) -> str:
    return f"is not loaded: it needs {name} {needed} or newer, and this is {name} {found}; {advice}, or remove the pack"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
