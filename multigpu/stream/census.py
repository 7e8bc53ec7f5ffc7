"""Counting the bytes of a model on each device, and comparing them with its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

from ..devices.torch_devices import device_name, device_of
from ..errors import PlacementNotApplied
from ..plan import DISK, Plan
from ..units import format_bytes
from .layout import leaves_of

Place = TypeVar("Place", torch.device, str)


def bytes_by_device(module: torch.nn.Module) -> dict[torch.device, int]:
    """Bytes of all parameters and buffers of `module` by device; memory that several of them share counts once."""
    return dict(_count(module, device_of))


InFile = Callable[[torch.Tensor], bool]
"""Whether a tensor in RAM is in pages of its model file."""


def bytes_by_home(module: torch.nn.Module, in_file: InFile) -> dict[str, int]:
    """The same by names, with the bytes in pages of the model file as those of `disk`."""
    return dict(_count(module, lambda leaf: str(DISK) if in_file(leaf) else device_name(device_of(leaf))))


def _count(module: torch.nn.Module, where: Callable[[torch.Tensor], Place]) -> Counter[Place]:
    seen: set[tuple[torch.device, int]] = set()
    count: Counter[Place] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        for leaf in leaves_of(tensor)[0]:
            memory = (device_of(leaf), leaf.data_ptr())
            if leaf.nbytes and memory not in seen:
                seen.add(memory)
                count[where(leaf)] += leaf.nbytes
    return count


def prove(model: torch.nn.Module, plan: Plan, in_file: InFile = lambda tensor: False) -> dict[str, int]:
    """Count the bytes on each device and return them. Raises `PlacementNotApplied` if they differ from the plan by over
    a block.

    If the CPU computes, what rests there is in pages of the model file, too, and counts as in RAM.
    """
    on_cpu = plan.compute.is_cpu
    found = bytes_by_home(model, lambda tensor: not on_cpu and in_file(tensor))
    wanted: Counter[str] = Counter()
    for home, count in plan.bytes_by_home().items():
        wanted[str(plan.compute if on_cpu and home.is_disk else home)] += count
    slack = max(placement.bytes for placement in plan.placements)
    if any(abs(found.get(device, 0) - wanted.get(device, 0)) > slack for device in {*found, *wanted}):
        said = ", ".join(f"{device} {format_bytes(count)}" for device, count in wanted.items())
        seen = ", ".join(f"{device} {format_bytes(count)}" for device, count in found.items())
        raise PlacementNotApplied(
            f"after loading, the weights of {type(model).__name__} should be on {said}, but {seen} were counted; "
            "another extension may have moved them: remove its nodes from this workflow, and report this message"
        )
    return found
