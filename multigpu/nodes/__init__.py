"""The nodes. `all_nodes` makes their classes, once ComfyUI asks for them; importing this package does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime import Runtime

NodeList = list[type[Any]]


def all_nodes(runtime: Runtime) -> NodeList:
    """Every node class of the pack, in the order of the menu."""
    return [node for make in _makers() for node in make(runtime)]


def _makers() -> tuple[Callable[[Runtime], NodeList], ...]:
    """One function per file of nodes; each takes the runtime and returns classes."""
    from .checkpoints import checkpoint_nodes
    from .free_memory import free_memory_nodes
    from .loaders import loader_nodes
    from .memory_report import memory_report_nodes
    from .place import place_nodes

    return (place_nodes, free_memory_nodes, memory_report_nodes, loader_nodes, checkpoint_nodes)
