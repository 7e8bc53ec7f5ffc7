"""Stands in for keep and eject on a host that lacks what they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import HostIncompatible


class NoFreeFlow:
    """What nodes do beside their own work has no effect; what is asked for explicitly says why it cannot be done."""

    def __init__(self, problem: HostIncompatible) -> None:
        self._problem = problem

    def watch_prompts(self) -> None:
        pass

    def placed(self, patcher: Any) -> None:
        pass

    def keep(self, component: Any, wanted: Any) -> None:
        pass

    def loaded_before(self, key: str) -> None:
        return None

    def remember_loaded(self, key: str, values: dict[str, Any], components: Sequence[Any]) -> None:
        pass

    def watch_ram(self, limit: int | None) -> None:
        pass

    def held_patchers(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._problem
