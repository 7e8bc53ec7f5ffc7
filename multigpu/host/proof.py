"""Counting what was placed, and comparing it with the plan."""

from __future__ import annotations

import torch

from ..errors import PlacementNotApplied
from ..plan import Plan
from ..stream.census import bytes_by_device
from ..units import format_bytes


def prove(model: torch.nn.Module, plan: Plan) -> dict[str, int]:
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
    return found
