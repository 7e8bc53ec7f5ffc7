"""What the user may set from outside, read once when ComfyUI loads the pack."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PREFIX = "MULTIGPU_"
_DEVELOPMENT = tuple(_PREFIX + word for word in ("DEV_", "HOST", "TEST_", "BENCH_"))
"""How variables begin that `dev.py`, the tests and the benchmarks read."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`MULTIGPU_ENABLED`, `MULTIGPU_LOG`, `MULTIGPU_FALL_BACK` and `MULTIGPU_RAM_LIMIT`, with their defaults."""

    enabled: bool = True
    """Off: ComfyUI loads the pack, but it offers no nodes. Helps to find out whether the pack causes a problem."""

    log_level: int = logging.INFO

    fall_back: bool = False
    """On: a workflow that names missing devices runs on ComfyUI's default device and RAM instead, with a warning."""

    ram_limit: int | None = None
    """Percent of RAM in use above which cached outputs and models are dropped between prompts. None: 85, but only if
    ComfyUI's own cache does not watch the RAM already."""

    problems: tuple[str, ...] = ()
    """One sentence about variables with invalid values, for which the defaults are used, and one about unknown ones."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Never fails: a mistyped setting is no reason to go without the pack."""
        given = {name: text.strip() for name, text in environment.items() if name.startswith(_PREFIX)}
        values: dict[str, Any] = {}
        wrong = []
        for name, variable in VARIABLES.items():
            text = given.pop(name, "")
            if not text:
                continue
            try:
                values[variable.field] = variable.read(text.lower())
            except (KeyError, ValueError):
                wrong.append(f"{name} is {text!r}, but it can be {variable.choices}: {variable.default} is used")
        unknown = sorted(name for name in given if not name.startswith(_DEVELOPMENT))
        problems = ["; ".join(wrong)] if wrong else []
        if unknown:
            problems.append(f"there is no setting {' or '.join(unknown)}; there are {', '.join(VARIABLES)}")
        return cls(**values, problems=tuple(problems))


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: the field it fills, and how its text in lower case becomes the value.

    `read` raises `KeyError` or `ValueError` for an invalid text; the message then names `choices` and `default`.
    """

    field: str
    read: Callable[[str], Any]
    choices: str
    default: str


def _percent(text: str) -> int:
    number = text.removesuffix("%").strip()
    if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 100:
        raise ValueError(text)
    return int(number)


VARIABLES = {
    "MULTIGPU_ENABLED": Variable("enabled", _SWITCH.__getitem__, ", ".join(_SWITCH), "on"),
    "MULTIGPU_LOG": Variable("log_level", _LEVELS.__getitem__, ", ".join(_LEVELS), "info"),
    "MULTIGPU_FALL_BACK": Variable("fall_back", _SWITCH.__getitem__, ", ".join(_SWITCH), "off"),
    "MULTIGPU_RAM_LIMIT": Variable(
        "ram_limit", _percent, "a percentage from 1 to 100", "85 (if ComfyUI's cache does not watch the RAM itself)"
    ),
}
