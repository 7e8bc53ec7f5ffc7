"""What the user may set from outside: by environment variables, and some of it in ComfyUI's settings dialog."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import RequestError

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PREFIX = "MULTIGPU_"
_DEVELOPMENT = tuple(_PREFIX + word for word in ("DEV_", "HOST", "TEST_", "BENCH_"))
"""How variables begin that `dev.py`, the tests and the benchmarks read."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables of `VARIABLES`, with their defaults."""

    enabled: bool = True
    """Off: ComfyUI loads the pack, but it offers no nodes. Helps to find out whether the pack causes a problem."""

    log_level: int = logging.INFO

    fall_back: bool = False
    """On: a workflow that names missing devices runs on ComfyUI's default device and RAM instead, with a warning."""

    ram_limit: int | None = None
    """Percent of RAM in use above which cached outputs and models are dropped between prompts. None: 85, but only if
    ComfyUI's own cache does not watch the RAM already."""

    measure: bool = False
    """On: the speeds of links and devices are measured anew, although an earlier start has kept them."""

    hoist: bool = True
    """On: layers that see one token are computed ahead for a whole run where that is faster, instead of streamed in
    every step. """

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Which fields do not have their defaults, and who has set them: ENVIRONMENT or DIALOG."""

    ray: str | None = None
    """The head of a Ray cluster, as HOST:PORT, whose devices can be chosen, too. None: Ray is not even imported."""

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
        return cls(**values, problems=tuple(problems), sources=dict.fromkeys(values, ENVIRONMENT))

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """With values from ComfyUI's settings dialog, by field; those that the environment has set stay.

        None is the default. Raises `RequestError` for what is no setting, or an invalid value.
        """
        now: dict[str, Any] = {}
        for name, value in values.items():
            if name not in OPTIONS:
                raise RequestError(f"there is no setting {name[:60]!a}; there are {', '.join(OPTIONS)}")
            now[name] = OPTIONS[name].value(name, value)
        now = {name: value for name, value in now.items() if self.sources.get(name) != ENVIRONMENT}
        sources = {name: source for name, source in self.sources.items() if name not in now}
        sources |= {name: DIALOG for name, value in now.items() if value is not None}
        default = Settings()
        now = {name: getattr(default, name) if value is None else value for name, value in now.items()}
        return replace(self, **now, sources=sources)

    def with_stored(self, stored: Mapping[str, Any]) -> Settings:
        """With what ComfyUI has saved of its settings dialog, by the ids there. Never fails: invalid values count as
        problems.
        """
        settings = self
        for name, option in OPTIONS.items():
            if option.id in stored:
                try:
                    settings = settings.changed({name: stored[option.id]})
                except RequestError as problem:
                    wrong = f"in ComfyUI's settings, {problem}: {VARIABLES[option.variable].default} is used"
                    settings = replace(settings, problems=(*settings.problems, wrong))
        return settings

    def with_head(self, text: str) -> Settings:
        """With the head of a Ray cluster that the file `RAY_FILE` names, unless the environment names one.

        Never fails: an invalid text counts as a problem.
        """
        if self.ray is not None or not text.strip():
            return self
        variable = VARIABLES["MULTIGPU_RAY"]
        try:
            return replace(self, ray=variable.read(text.strip().lower()))
        except ValueError:
            shown = ascii(text.strip()[:60])
            wrong = f"the file {RAY_FILE} says {shown}, but it can be {variable.choices}: {variable.default} is used"
            return replace(self, problems=(*self.problems, wrong))

    def to_json(self) -> dict[str, Any]:
        """The settings that can be changed while ComfyUI runs."""
        return {
            name: {
                "value": option.shown(getattr(self, name)),
                "source": self.sources.get(name, "default"),
                "choices": option.choices,
            }
            for name, option in OPTIONS.items()
        }


ENVIRONMENT, DIALOG = "environment", "settings"
RAY_FILE = "ray_head"
"""The file in our folder of ComfyUI's user directory. It is not in ComfyUI's settings dialog: whoever reaches ComfyUI's
port can write those, and a cluster that somebody else names would get the token."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: the field it fills, and how its text in lower case becomes the value.

    `read` raises `KeyError` or `ValueError` for an invalid text; the message then names `choices` and `default`.
    """

    field: str
    read: Callable[[str], Any]
    choices: str
    default: str


def _head(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ValueError(text)
    return text


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
    "MULTIGPU_HOIST": Variable("hoist", _SWITCH.__getitem__, ", ".join(_SWITCH), "on"),
    "MULTIGPU_MEASURE": Variable("measure", _SWITCH.__getitem__, ", ".join(_SWITCH), "off"),
    "MULTIGPU_RAY": Variable("ray", _head, "the head of a Ray cluster, as HOST:PORT", "none"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting that is in ComfyUI's settings dialog, too: its id there, its variable, and what it can be, as JSON."""

    id: str
    variable: str
    choices: Any

    def value(self, name: str, given: Any) -> Any:
        """What a value from the dialog means; None for the default. Raises `RequestError` for an invalid one."""
        if given is None or given == "" or (self.variable == _LIMIT and given == 0 and given is not False):
            return None
        variable = VARIABLES[self.variable]
        try:
            if isinstance(given, (str, int)):
                return variable.read(str(given).strip().lower())
        except (KeyError, ValueError):
            pass
        shown = ascii(given if not isinstance(given, str) else given[:60])[:80]
        raise RequestError(f"{name} is {shown}; it can be {variable.choices}, or null for {variable.default}")

    def shown(self, value: Any) -> Any:
        """A value as people write it."""
        return next((word for word, level in _LEVELS.items() if level == value and self.id == _LOG), value)


_LIMIT, _LOG = "MULTIGPU_RAM_LIMIT", "MultiGPU.LogLevel"
OPTIONS = {
    "fall_back": Option("MultiGPU.FallBack", "MULTIGPU_FALL_BACK", [False, True]),
    "ram_limit": Option("MultiGPU.RamLimit", _LIMIT, {"min": 1, "max": 100, "default": None}),
    "log_level": Option(_LOG, "MULTIGPU_LOG", [*_LEVELS]),
}
