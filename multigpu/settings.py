"""What the user may set from outside, read once when ComfyUI loads the pack."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from .errors import InputError

_Value = TypeVar("_Value")

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Settings:
    """`MULTIGPU_ENABLED`, `MULTIGPU_LOG`, `MULTIGPU_FALL_BACK` and `MULTIGPU_RAM_LIMIT`, with their defaults."""

    enabled: bool = True
    """Off: ComfyUI loads the pack, but it offers no node. To find out whether the pack is the cause of something."""

    log_level: int = logging.INFO

    fall_back: bool = False
    """On: a workflow that names devices which are not here runs on ComfyUI's default one and RAM, with a warning."""

    ram_limit: int | None = None
    """Percent of RAM in use above which models and cached outputs are let go between prompts. Not given: 85, but only
    where ComfyUI's own cache does not watch the RAM already."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises InputError when a variable has a value that means nothing."""
        return cls(
            enabled=_choice(environment, "MULTIGPU_ENABLED", _SWITCH, "on"),
            log_level=_choice(environment, "MULTIGPU_LOG", _LEVELS, "info"),
            fall_back=_choice(environment, "MULTIGPU_FALL_BACK", _SWITCH, "off"),
            ram_limit=_percent(environment, "MULTIGPU_RAM_LIMIT"),
        )


def _choice(environment: Mapping[str, str], name: str, choices: Mapping[str, _Value], default: str) -> _Value:
    given = environment.get(name) or default
    if given.lower() not in choices:
        raise InputError(f"{name} is {given!r}; it can be {', '.join(choices)}")
    return choices[given.lower()]


def _percent(environment: Mapping[str, str], name: str) -> int | None:
    given = (environment.get(name) or "").strip()
    if not given:
        return None
    number = given.removesuffix("%").strip()
    if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 100:
        raise InputError(f"{name} is {given!r}; it can be a percentage from 1 to 100, such as 85")
    return int(number)
