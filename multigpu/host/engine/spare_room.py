"""Room on the compute device beyond what the plan in force uses: filled with streamed blocks, given back when asked."""

from __future__ import annotations

from typing import Any

from comfy import model_management

from ...devices.backends import free_bytes
from ...devices.torch_devices import torch_device
from ...plan import Plan
from ...plan.retain import retained
from ...plan.spill import spilled
from ...stream.streamer import Spare
from ..loaded_models import entries
from . import on_disk
from .model_states import ModelState, Placed

KEPT, LEAST = 5 / 8, 3 / 8
"""Shares of the host's reserve. So much of it is left free, about what DynamicVRAM leaves; with less, some is given
back."""
LEEWAY = 256 << 20
"""Bytes by which the room that the host finds may change from prompt to prompt before anything moves."""


def spare_on_compute(placed: Placed, state: ModelState, plan: Plan) -> Spare | None:
    """What a model that is loaded by `plan` may retain; None if it may not, or if no driver tells."""
    device = placed.plan.compute
    if not placed.fills or device.is_cpu or free_bytes(device) is None:
        return None

    def room() -> int:
        reserve = model_management.extra_reserved_memory()
        free = free_bytes(device) or 0
        return 0 if LEAST * reserve <= free <= KEPT * reserve else int(free - KEPT * reserve)

    return Spare(room, lambda sizes, count: retained(state.steps.foreseen(plan), sizes, count))


def plan_within(asked: Plan, in_force: Plan | None, allowed: float, placed: Placed, state: ModelState) -> Plan:
    """The plan to load by when the host allows so many bytes on the compute device.

    The one in force stays if it fits. It may have more blocks in RAM than necessary if streamed blocks fill the room.
    """
    stays = state.planned == asked and (placed.fills or in_force == asked)
    if in_force is not None and stays and _needs(in_force) <= allowed + _leeway(placed):
        return in_force
    return spilled(asked, _needs(asked) - allowed, on_disk.able(state, asked))


def note_room(patcher: Any, placed: Placed, state: ModelState, allowed: float) -> None:
    """The host has said how much it allows. If that is less than last time, give back as much, else retain more."""
    lost = state.allowed - allowed
    if lost > _leeway(placed):
        state.residence.release(lost)
    if state.residence.streamer is not None:
        state.residence.streamer.retain_more()
    state.allowed = allowed
    state.kept_free = model_management.get_free_memory(patcher.load_device) + patcher.loaded_size() - allowed


def make_way(patcher: Any, state: ModelState) -> None:
    """The host is about to load a model again that is loaded, and frees memory first.

    What it wanted to be free last time is freed here, if it would unload other models for it.
    """
    device = patcher.load_device
    if state.residence.retained_bytes and any(entry.model.model is not patcher.model for entry in entries(device)):
        state.residence.release(state.kept_free - model_management.get_free_memory(device))


def _needs(plan: Plan) -> int:
    return plan.bytes_on(plan.compute) + plan.ring_bytes


def _leeway(placed: Placed) -> float:
    total: float = model_management.get_total_memory(torch_device(placed.plan.compute))
    return min(LEEWAY, total / 50)
