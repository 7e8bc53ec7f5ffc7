"""Which symbols of the host in this process are as expected, and which features they allow. Compares no versions."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from opcode import opmap
from types import CodeType
from typing import Any

from ..errors import HostIncompatible
from .surface import SURFACE, Feature, Symbol


@dataclass(frozen=True, slots=True)
class Finding:
    """A symbol and what is wrong with it. `problem` is empty if nothing is."""

    symbol: Symbol
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostCapabilities:
    """What the host offers.

    `version` is for people to read. `dynamic_vram`: whether the host's loaders make dynamic patchers in this process.
    """

    version: str
    dynamic_vram: bool
    findings: tuple[Finding, ...]

    def offers(self, feature: Feature) -> bool:
        """Whether every symbol that the feature needs is as expected."""
        return not any(found.problem for found in self.findings if found.symbol.feature is feature)

    def need(self, feature: Feature) -> None:
        """Raises HostIncompatible, with the symbol at fault, when the feature cannot work here."""
        problem = dict(self.features_off()).get(feature.value)
        if problem is not None:
            raise HostIncompatible(
                f"{feature.value} is off, because {problem}; update MultiGPU, or see what "
                "`python -m multigpu doctor` says in its folder"
            )

    def features_off(self) -> Iterator[tuple[str, str]]:
        """Each feature that cannot work here, with the first symbol that differs."""
        for feature in Feature:
            problems = [found.problem for found in self.findings if found.symbol.feature is feature and found.problem]
            if problems:
                yield feature.value, problems[0]

    def summary(self) -> str:
        differing = sum(1 for found in self.findings if found.problem)
        if differing:
            return f"{differing} of {len(self.findings)} host symbols differ from what is expected"
        return f"all {len(self.findings)} host symbols are as expected"


def probe() -> HostCapabilities:
    """Compare the host in this process with `SURFACE`. Changes nothing and never raises: problems become findings."""
    return HostCapabilities(
        version=str(_resolve("comfyui_version", "__version__", "unknown")),
        dynamic_vram=bool(_resolve("comfy.memory_management", "aimdo_enabled", False)),
        findings=tuple(Finding(symbol, _problem(symbol)) for symbol in SURFACE),
    )


_MISSING = object()
_ATTRIBUTE = object()
"""Stands for the value of an attribute that only the objects of a class have."""


def _resolve(module: str, path: str, default: Any) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return default
    parts = path.split(".")
    for number, part in enumerate(parts):
        owner, found = found, _attribute(found, part)
        if found is _MISSING:
            return _ATTRIBUTE if all(_objects_have(owner, name) for name in parts[number:]) else default
    return found


def _attribute(owner: Any, name: str) -> Any:
    """What an object has by a name. What every class has (`__call__`) does not count."""
    if isinstance(owner, type) and hasattr(type, name) and not any(name in vars(base) for base in owner.__mro__):
        return _MISSING
    return getattr(owner, name, _MISSING)


def _objects_have(owner: Any, name: str) -> bool:
    """Whether objects of a class have an attribute: the class annotates it, or its `__init__` assigns it.

    If `owner` is a function: whether it assigns such an attribute, of whatever object.
    """
    for base in getattr(owner, "__mro__", (owner,)):
        code = getattr(vars(base).get("__init__", base), "__code__", None)
        if name in vars(base).get("__annotations__", ()) or (code is not None and name in _assigned(code)):
            return True
    return False


@functools.cache
def _assigned(code: CodeType) -> frozenset[str]:
    """The attributes that a function assigns: read from its bytecode, because `dis` takes ten times as long."""
    names, high = set(), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if operation == opmap["EXTENDED_ARG"] else 0
        if operation == opmap["STORE_ATTR"]:
            names.add(code.co_names[argument])
    return frozenset(names)


def _problem(symbol: Symbol) -> str:
    found = _resolve(symbol.module, symbol.path, _MISSING)
    if found is _MISSING:
        return f"{symbol.name} is missing"
    if not symbol.positional and not symbol.keywords:
        return ""
    try:
        parameters = [name for name in inspect.signature(found).parameters if name != "self"]
    except (TypeError, ValueError):
        return f"{symbol.name} cannot be called"
    begins = tuple(parameters[: len(symbol.positional)]) == symbol.positional
    if begins and set(symbol.keywords) <= set(parameters):
        return ""
    expected = ", ".join((*symbol.positional, *(f"{name}=" for name in symbol.keywords)))
    return f"{symbol.name} has the parameters ({', '.join(parameters)}), expected ({expected})"
