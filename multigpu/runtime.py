"""The composition root: the one object that holds the state of this pack in one process."""

from __future__ import annotations

from typing import Any


class Runtime:
    @classmethod
    def start(cls, environment):
        import logging

        logging.getLogger("multigpu").info("[MultiGPU] loaded")
        return cls()

    def nodes(self) -> list[Any]:
        return []
