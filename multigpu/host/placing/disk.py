"""The model file as a home, for the planner: what can rest in it, how fast it is read, and why it cannot be used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import comfy.model_base

from ...errors import AllocationError
from ...plan import CPU, DISK, DeviceBudget, Plan
from ...stream.file_speed import reading_speed
from ..engine.blocks import modules_of
from ..engine.file_pages import paged_leaves
from ..engine.model_states import ModelStates


def able(patcher: Any, states: ModelStates) -> set[str]:
    """The blocks of a patcher's model that can rest in the model file."""
    if patcher.is_dynamic() and not isinstance(patcher.model, comfy.model_base.BaseModel):
        return set()  # the static copy that a plan needs has copies of the weights
    return states.in_file(patcher)


def refusal(patcher: Any, *, dynamic_vram: bool) -> AllocationError:
    """Why none can."""
    name = type(patcher.model).__name__
    if not isinstance(patcher.model, comfy.model_base.BaseModel):
        why = f"{name} is no diffusion model, and only the weights of those stay in their file"
    elif not dynamic_vram:
        why = "DynamicVRAM is off in this ComfyUI, and only with it do weights stay in their file"
    else:
        why = (
            f"the weights of {name} are not in a safetensors file in the form in which they are used (they are cast to "
            "another type, quantised with many scales, or from another kind of file)"
        )
    return AllocationError(f"disk is named, but {why}; write cpu instead")


class FileSpeeds:
    """How fast model files are read: measured once for each drive, from the system's cache and past it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], float | None] = {}

    def speed(self, patcher: Any, plan: Plan, budgets: Sequence[DeviceBudget]) -> float | None:
        """Bytes per second from the file to the compute device; None where that cannot be measured.

        What is read in each step comes from the system's cache if free RAM is left for all of it. The bytes go on to
        the compute device from RAM, so they are no faster than that link.
        """
        leaves = paged_leaves(modules_of(patcher))
        ram = next((budget for budget in budgets if budget.device == CPU), None)
        if not leaves or ram is None:
            return None
        cached = plan.bytes_on(DISK) + plan.bytes_on(CPU) < ram.free
        try:
            drive = os.fstat(leaves[0].descriptor).st_dev, cached
        except OSError:  # on Windows it is no descriptor
            return None
        if drive not in self._known:
            speed = reading_speed(leaves, cached=cached)
            self._known[drive] = None if speed is None else float(f"{speed:.2g}")
        known = self._known[drive]
        return None if known is None else min(known, ram.link_speed)
