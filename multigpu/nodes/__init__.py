"""The nodes. `all_nodes` makes their classes, once ComfyUI asks for them; importing this package does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime import Runtime


def all_nodes(runtime: Runtime) -> list[type[Any]]:
    """Every node class of the pack, in the order of the menu. Each file of nodes has one function that makes them."""
    from .checkpoints import checkpoint_nodes
    from .free_memory import free_memory_nodes
    from .loaders import loader_nodes
    from .memory_report import memory_report_nodes
    from .other_machines import other_machines_nodes
    from .place import place_nodes

    makers = (
        place_nodes, free_memory_nodes, memory_report_nodes, loader_nodes, checkpoint_nodes, other_machines_nodes
    )  # fmt: skip
    return [node for make in makers for node in make(runtime)]
