"""Models of which blocks rest in their file (`disk`): which blocks may, and what becomes of their patches.

A weight in the file is never patched where it rests. It gets its patches each time it passes, on the compute device, by
the host's own code, in full precision; it has no entry in the host's table of originals. What would write into such a
weight (weight hooks), or read it patched (saving), has its block in RAM instead.
"""

from __future__ import annotations

from typing import Any

from ...errors import HostError
from ...plan import DISK, Plan
from ...plan.spill import off_disk
from .blocks import split
from .model_states import ModelState


def able(state: ModelState, plan: Plan) -> set[str]:
    """The blocks that can rest in the file; not looked for if the plan has none there."""
    return state.in_file() if plan.bytes_on(DISK) else set()


def fitted(patcher: Any, state: ModelState, plan: Plan, *, patched: bool) -> Plan:
    """The plan with those blocks in RAM that cannot rest in the file; with `patched` all that have patches."""
    if not plan.bytes_on(DISK):
        return plan
    in_file = state.in_file()
    away = {placement.block for placement in plan.streamed if placement.block not in in_file}
    keys = {*_hooked(patcher), *(patcher.patches if patched else ())}
    return off_disk(plan, away | {split(key)[0] for key in keys})


def take_patches_out(state: ModelState, plan: Plan) -> None:
    """Let patched weights rest in their pages whose blocks are to rest in the file."""
    keys = [key for key in state.backup if (block := split(key)[0]) in plan and plan[block].home.is_disk]
    if keys:
        state.residence.changing()
    for key in keys:
        state.rest(key)


def refuse_writing(patcher: Any, state: ModelState) -> None:
    """Raises HostError if weight hooks would write into weights in the file."""
    for key in _hooked(patcher):
        if state.residence.is_in_file(split(key)[0]):
            raise HostError(
                f"a LoRA on a condition would change {key}, which rests in the model file and cannot be written there; "
                "load the model again after the LoRA was set, or write cpu instead of disk"
            )


def _hooked(patcher: Any) -> set[str]:
    return {key for patches in patcher.hook_patches.values() for key in patches}
