"""The state of placed models, shared by all clones of their patchers."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import HostError
from ...plan import Plan
from ...stream.file_reader import FileReader
from ...stream.homes import moved
from ...stream.originals import CarriedOriginal, FileOriginal, Original
from ...stream.residence import RAM, Residence, move
from ..loaded_models import entries, hand_over, take_out
from .blocks import split
from .file_pages import FilePages

ATTACHMENT = "multigpu.placement"
"""The key under which a patcher's `attachments` hold its `Placed`."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What the host's `current_weight_patches_uuid` is while a model is loaded by a plan.

    It equals no patcher's uuid, so that an unplaced patcher of the model restores all weights before it loads them. And
    every load or unload by other code replaces it: as long as it is there, the model is as we left it.
    """

    patches_uuid: Any


@dataclass(slots=True)
class ModelState:
    """The state of one model, shared by all clones of its patcher."""

    backup: dict[str, Any]
    """The host's table of original weights, which all patchers of the model share. It says what is patched."""
    objects: dict[str, Any]
    """The host's table of what object patches have replaced, shared likewise."""
    residence: Residence = field(default_factory=Residence)
    patchers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    modules: weakref.WeakValueDictionary[str, torch.nn.Module] = field(default_factory=weakref.WeakValueDictionary)
    """The model's own modules by block, without what object patches may have put in their place."""
    loaded: Loaded | None = None
    successor_is_placed: bool = False
    """Whether the patcher that the host is about to load in place of the loaded one is placed, too."""
    pages: FilePages = field(init=False)

    def __post_init__(self) -> None:
        self.pages = FilePages(self.modules)

    def adopt(self, patcher: Any) -> None:
        """Count a patcher among those of the model. Tables that a pack gave it are replaced by the model's."""
        self.patchers.add(patcher)
        patcher.backup, patcher.object_patches_backup = self.backup, self.objects

    def misplaced(self) -> str | None:
        """A block whose weights are not at their home; None if all are."""
        return self.residence.misplaced(self.modules)

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether the model is loaded by us and no other code has loaded or unloaded it since."""
        return self.loaded is not None and getattr(model, "current_weight_patches_uuid", None) is self.loaded

    def take_back(self, model: torch.nn.Module) -> None:
        """Give the host's entry of a loaded model to a placed patcher, if the host has given it to an unplaced one.

        It does that when the placed patcher that has loaded the model is gone: it goes on with the one that this was
        made from. But that one takes blocks on donors for blocks on the compute device when it frees memory, and it
        cannot restore weights whose file has changed.
        """
        for entry in entries():
            if entry.model.model is model and entry.model not in self.patchers:
                fits = (its for its in self.patchers if its.placed is not None)
                own = next((its for its in fits if its.load_device == self.residence.compute), None)
                if own is None:
                    take_out(entry)
                    next(iter(self.patchers)).detach()
                else:
                    hand_over(entry, own)

    def leave(self) -> dict[str, Original]:
        """Stop streaming, bring donors' bytes to RAM, and take all patches out of the weights.

        Returns the originals that cannot be read because their file has changed: those weights stay patched.
        """
        self.residence.leave(self.pages.rest)
        self.loaded = None
        lost: dict[str, Original] = {}
        for key, original in [*self.backup.items()]:
            if isinstance(original, Original):
                try:
                    self.restore(key)
                except HostError:
                    lost[key] = original
        return lost

    def unload(self, model: Any) -> None:
        """Move a model to RAM whose weights stay patched. Its other patchers cannot: they raise an error first."""
        for entry in [entry for entry in entries() if entry.model.model is model]:
            take_out(entry)
        for module in self.modules.values():
            move(module, RAM)
        model.device, model.model_loaded_weight_memory = RAM, 0

    def weight(self, key: str) -> torch.Tensor:
        """The present weight behind a host key."""
        block, name = split(key)
        weight: torch.Tensor = getattr(self.modules[block], name)
        return weight

    def put(self, key: str, weight: torch.Tensor) -> None:
        """Put a weight into the model as it is, on the device that it is on."""
        block, name = split(key)
        module = self.modules[block]
        slots: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        slots[name] = weight

    def carried(self, key: str, attributes: dict[str, Any], patches: Any) -> CarriedOriginal:
        """The entry of a weight that carries its patches, and had these attributes without them."""
        block, name = split(key)
        return CarriedOriginal(weakref.ref(self.modules[block]), name, attributes, patches)

    def rewrite(self, key: str, tensor: torch.Tensor, *, ours: bool = True) -> None:
        block, name = split(key)
        self.pages.written(key)
        self.residence.rewrite(block, self.modules[block], name, tensor, ours=ours)

    def restore(self, key: str, reader: FileReader | None = None) -> None:
        """Take all patches out of a weight. Raises HostError if its original is out of reach.

        With a reader, a weight that is in its file is read by way of the compute device, which is the fastest.
        """
        original = self.backup[key]
        if isinstance(original, CarriedOriginal):
            original.restore()
        elif isinstance(original, FileOriginal):
            page = self.pages.of(key, original)
            with original.reading() as weight:
                if page is None:
                    self.rewrite(key, weight, ours=False)
                elif self.residence.plan is None and not self.residence.is_homed(split(key)[0]):
                    self.put(key, moved(self.weight(key), weight))
                else:
                    read = reader.on_device(page) if reader is not None and reader.reads(page) else None
                    self.rewrite(key, weight if read is None else read, ours=read is not None)
                    self.pages.copied(key)
        else:
            self.rewrite(key, original.weight)
        del self.backup[key]


class ModelStates:
    """The states of all models that were ever placed and still live."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[torch.nn.Module, ModelState] = weakref.WeakKeyDictionary()
        self._without_model: deque[Residence] = deque()
        self._placed: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        self.classes: dict[type, type] = {}
        """Host patcher class -> the same with placement mixed in."""

    def of(self, patcher: Any) -> ModelState:
        state = self._states.get(patcher.model)
        if state is None:
            backup, objects = patcher.backup, patcher.object_patches_backup
            if any(other.backup is backup for other in self._states.values()):  # a pack's clone has a copy of the model
                backup, objects = {**backup}, {**objects}
            state = self._states[patcher.model] = ModelState(backup, objects)
            weakref.finalize(patcher.model, self._model_is_gone, state.residence).atexit = False
        return state

    def _model_is_gone(self, residence: Residence) -> None:
        """Free the model's memory at once if no device uses it; otherwise leave that to `settle`."""
        if residence.idle:
            residence.close()
        else:
            self._without_model.append(residence)

    def note_placed(self, patcher: Any, how: Any, placed: Any) -> None:
        """`placed` was made of `patcher` as `how` says."""
        self._placed.setdefault(patcher, {})[patcher.patches_uuid, how] = weakref.ref(placed)

    def placed_before(self, patcher: Any, how: Any) -> Any:
        """The placed patcher that was made of this patcher in the same way before, if it still exists."""
        found = self._placed.get(patcher, {}).get((patcher.patches_uuid, how))
        return None if found is None else found()

    def settle(self) -> None:
        """Free what is no longer used: by models that are gone, by models whose placed patchers are all gone, and by
        models that an unplaced patcher has loaded since.

        Python may destroy objects at any moment and in any thread. So device work is not done then, but here: on the
        prompt worker, before and after prompts, before loading, and when memory is freed.
        """
        while self._without_model:
            self._without_model.popleft().close()
        for model, state in [*self._states.items()]:
            if not state.patchers:
                if state.holds(model) and state.leave():
                    state.unload(model)
                state.residence.forget()
                del self._states[model]
            elif state.loaded is not None and not state.holds(model):
                state.loaded = None
                state.residence.forget()
            elif state.loaded is not None:
                state.take_back(model)


@dataclass(frozen=True, slots=True)
class Placed:
    """The attachment: a plan, and the states it is carried out on."""

    plan: Plan
    states: ModelStates

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        """A deep copy of a patcher has the same plan, and a model with a state of its own."""
        return self
