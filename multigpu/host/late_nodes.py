"""Nodes that can only be made when all packs are loaded, because they wrap nodes of other packs.

ComfyUI loads packs in no fixed order, and starts its server after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nodes
from server import PromptServer


def add_when_all_packs_are_loaded(make: Callable[[], list[type[Any]]], beside: str) -> None:
    """When the server starts, give ComfyUI the nodes that `make` returns; the name of each class is the node's id.

    They are shown as nodes of the same pack as the node `beside`.
    """

    async def add(_: Any) -> None:
        for node in make():
            node.RELATIVE_PYTHON_MODULE = nodes.NODE_CLASS_MAPPINGS[beside].RELATIVE_PYTHON_MODULE
            nodes.NODE_CLASS_MAPPINGS[node.__name__] = node

    PromptServer.instance.app.on_startup.append(add)
