"""Counting the bytes of a model on each device, and comparing them with its plan."""

from __future__ import annotations

from collections import Counter

import torch

from ..devices.torch_devices import device_of
from ..errors import PlacementNotApplied
from ..plan import Plan
from ..units import format_bytes
from .layout import leaves_of


def bytes_by_device(module: torch.nn.Module) -> dict[torch.device, int]:
    """Bytes of all parameters and buffers of `module` by device; memory that several of them share counts once."""
    seen: set[tuple[torch.device, int]] = set()
    count: Counter[torch.device] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        for leaf in leaves_of(tensor)[0]:
            where = (device_of(leaf), leaf.data_ptr())
            if leaf.nbytes and where not in seen:
                seen.add(where)
                count[where[0]] += leaf.nbytes
    return dict(count)


def prove(model: torch.nn.Module, plan: Plan) -> None:
    """Count the bytes on each device. Raises `PlacementNotApplied` if they differ from the plan by over a block."""
    found = {str(device): count for device, count in bytes_by_device(model).items()}
    wanted = {str(home): count for home, count in plan.bytes_by_home().items()}
    slack = max(placement.bytes for placement in plan.placements)
    if any(abs(found.get(device, 0) - wanted.get(device, 0)) > slack for device in {*found, *wanted}):
        said = ", ".join(f"{device} {format_bytes(count)}" for device, count in wanted.items())
        seen = ", ".join(f"{device} {format_bytes(count)}" for device, count in found.items())
        raise PlacementNotApplied(
            f"after loading, the weights of {type(model).__name__} should be on {said}, but {seen} were counted; "
            "another extension may have moved them: remove its nodes from this workflow, and report this message"
        )
