"""What is true of placed models, shared by all clones of their patchers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..plan import Plan
from ..stream.residence import Residence

ATTACHMENT = "multigpu.placement"
"""The key under which a patcher's `attachments` hold its `Placed`."""

Patches = tuple[Any, ...]
"""The host's patches for one weight: (strength, patch, model strength, offset, function) each."""


@dataclass(slots=True)
class ModelState:
    """What is true of one model on one compute device, whichever clone of its patcher asks."""

    residence: Residence
    patchers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    baked: dict[str, Patches] = field(default_factory=dict)
    loaded_bytes: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    """Bytes by device as counted after the last placing."""
    broken: str | None = None


class ModelStates:
    """The states of all models that were ever placed and still live."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.device, ModelState]]
        self._states = weakref.WeakKeyDictionary()
        self.classes: dict[type, type] = {}
        """Host patcher class -> the same with placement mixed in."""

    def of(self, patcher: Any) -> ModelState:
        states = self._states.setdefault(patcher.model, {})
        state = states.get(patcher.load_device)
        if state is None:
            state = states[patcher.load_device] = ModelState(Residence(patcher.load_device))
            weakref.finalize(patcher.model, state.residence.close).atexit = False
        return state

    def leave_other_devices(self, patcher: Any) -> None:
        """A model computes on one device at a time: end what was set up for it on others."""
        for device, state in self._states.get(patcher.model, {}).items():
            if device != patcher.load_device:
                state.residence.forget()


@dataclass(frozen=True, slots=True)
class Placed:
    """The attachment: a plan, and the states it is carried out on."""

    plan: Plan
    states: ModelStates
    poison: bool = False
