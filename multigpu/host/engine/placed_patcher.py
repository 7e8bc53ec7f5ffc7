"""A model patcher that keeps its model where a plan puts it.

`PlacedPatcher` is mixed into the host's static patcher class (or a pack's own subclass of it) at run time, with
`PlacedLoading`, which loads. The plan travels with clones in `attachments`; what is true of the model itself (where its
blocks rest, which patches are baked in) is shared by all clones of one model, in `ModelState`. Without a plan for its
load device a patcher behaves as the class it was made from: that is how core's clones for other devices come out right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...devices.torch_devices import device_name, torch_device
from ...errors import InputError, PlacementNotApplied
from ...plan import CPU, DISK, Plan
from ..loaded_models import entries
from .blocks import modules_of
from .model_states import ATTACHMENT, Loaded, ModelStates, Placed
from .on_disk import refuse_writing
from .placed_loading import PlacedLoading
from .placed_patching import PlacedPatching
from .spare_room import make_way

if TYPE_CHECKING:
    Base = PlacedLoading
else:
    Base = object  # `PlacedLoading` comes later in the order of resolution: see `placed_class`

log = logging.getLogger("multigpu")


class PlacedPatcher(Base):
    """Mixed in before a patcher class. Overrides what unloads and counts, and sees to it that a load keeps the plan."""

    def __del__(self) -> None:
        """Drops the plan first, so that the host's code does not unload the model: another clone may have loaded it.

        A copy that a pack has made may share the dict of attachments, so it is not changed.
        """
        self.attachments = {}
        super().__del__()

    def clone(self, *arguments: Any, **named: Any) -> Any:
        """A clone is placed as this patcher is, whatever a pack's own `clone` has made of it."""
        clone = super().clone(*arguments, **named)
        placed = self.attachments.get(ATTACHMENT)
        if placed is not None:
            _adopt(clone, placed)
            inherit(clone, self)
        return clone

    def model_size(self) -> int:
        placed = self.placed
        if placed is None:
            return super().model_size()
        return placed.plan.bytes_on(placed.plan.compute) + placed.plan.ring_bytes

    def loaded_size(self) -> int:
        placed = self.placed
        if placed is None:
            return super().loaded_size()
        return self.model.model_loaded_weight_memory + placed.states.of(self).residence.retained_bytes

    def load(self, *arguments: Any, **named: Any) -> None:
        super().load(*arguments, **named)
        self._check()

    def partially_load(self, *arguments: Any, **named: Any) -> Any:
        if ATTACHMENT not in self.attachments:
            raise PlacementNotApplied(
                f"{type(self.model).__name__} was placed, but a later node has removed the plan from its "
                f"{_own_class(type(self)).__name__}; put the place node after that node"
            )
        loaded = super().partially_load(*arguments, **named)
        try:
            self._check()
        except PlacementNotApplied:
            self.detach()
            raise
        return loaded

    def _check(self) -> None:
        """After a load. Raises PlacementNotApplied if code of a pack has loaded the model, or moved weights of it."""
        placed = self.placed
        if placed is None:
            return
        state = placed.states.of(self)
        if not state.holds(self.model) or state.loaded is None or state.loaded.patches_uuid != self.patches_uuid:
            where = "it does not use ComfyUI's own loading"
        elif _is_all_ours(self) or (block := state.misplaced()) is None:
            return
        else:
            where = f"it, or another node, has moved the weights of {block}"
        cls = _own_class(type(self))
        raise PlacementNotApplied(
            f"{type(self.model).__name__} was placed, but its {cls.__name__} ({cls.__module__}) did not load it by the "
            f"plan: {where}; remove the place node, or the node that moves weights"
        )

    def model_patches_models(self) -> Any:
        """The host calls this first when it loads models. Later it marks those that it loads together.

        So marks (`currently_used`) that an earlier load has left on models on the donors are removed here.
        """
        placed = self.placed
        if placed is not None:
            donors = [home for home in placed.plan.bytes_by_home() if home not in (CPU, DISK, placed.plan.compute)]
            for entry in (entry for home in donors for entry in entries(torch_device(home))):
                entry.currently_used = False
        return super().model_patches_models()

    def is_clone(self, other: Any) -> bool:
        """The host calls this on a patcher that it is about to load, and then `detach` on the one that it replaces."""
        clone = bool(super().is_clone(other))
        placed = self.placed
        if clone and placed is not None:
            placed.states.of(self).successor_is_placed = True
        return clone

    def detach(self, unpatch_all: bool = True) -> Any:
        """With `unpatch_all` False the host asks this patcher to release the model for another one, without unloading.

        A placed successor takes over the loaded blocks. An unplaced one cannot, so the model is unloaded first.
        """
        placed = self.placed
        if placed is not None and not unpatch_all:
            state = placed.states.of(self)
            unpatch_all = state.holds(self.model) and not state.successor_is_placed
            state.successor_is_placed = False
            if not unpatch_all:
                make_way(self, state)
        return super().detach(unpatch_all)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        placed = self.placed
        if placed is None or not unpatch_weights:
            return super().unpatch_model(device_to, unpatch_weights=unpatch_weights)
        self._move_patched_objects(device_to or self.offload_device)
        super().unpatch_model(None, unpatch_weights=False)  # the model's own modules, whose names we know
        self.unpatch_hooks()
        state = placed.states.of(self)
        lost = state.leave()
        for key in lost:
            del self.backup[key]
        if (device_to or self.offload_device).type == "cpu":
            state.pages.rest_all(self.load_device, without=lost)
        result = super().unpatch_model(device_to, unpatch_weights=unpatch_weights)
        if lost:  # the next load must ask for exactly these patches; any other raises the error about the changed file
            self.backup.update(lost)
            self.model.current_weight_patches_uuid = Loaded(None)
        return result

    def model_state_dict_for_saving(self, *arguments: Any, **named: Any) -> Any:
        """Weights are saved with their patches, also those that were to get them when they are first used."""
        placed = self.placed
        if placed is not None and placed.states.of(self).holds(self.model):
            placed.states.of(self).residence.due.finish()
        return super().model_state_dict_for_saving(*arguments, **named)

    def patch_hooks(self, hooks: Any) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).patch_hooks(hooks), hooks is not None)

    def unpatch_hooks(self, whitelist_keys_set: Any = None) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).unpatch_hooks(whitelist_keys_set), False)

    def _change_by_hooks(self, change: Callable[[], Any], expected: bool) -> Any:
        """Weight hooks write into the weights between steps: nothing staged before may be used after."""
        placed = self.placed
        if placed is None or not (expected or self.hook_backup):
            return change()
        state = placed.states.of(self)
        residence = state.residence
        if expected:
            refuse_writing(self, state)
        residence.due.finish()
        residence.changing()
        result = change()
        residence.changed()
        return result


def placed_class(cls: type, states: ModelStates) -> type:
    """`cls` with placement mixed in; the same class each time. Raises InputError if it is no patcher class of the host.

    What a pack's class overrides comes after `PlacedPatcher`, and before `PlacedLoading` and the host's class. It has
    the name of `cls`: packs look for that, too.
    """
    if issubclass(cls, PlacedPatcher):
        return cls
    if not issubclass(cls, ModelPatcher):
        raise InputError(
            f"a {cls.__name__} cannot be placed: it is not one of ComfyUI's model patchers, although it looks like one "
            f"({cls.__module__}); remove the place node, or load this model with another loader"
        )
    if cls not in states.classes:
        bases = (PlacedPatcher, PlacedLoading) if cls is ModelPatcher else (PlacedPatcher, cls, PlacedLoading)
        states.classes[cls] = type(
            cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        )
    return states.classes[cls]


def _own_class(cls: type) -> type:
    """The patcher class, of the host or of a pack, that placement was mixed into."""
    ours = (PlacedLoading, PlacedPatching)
    return next(base for base in cls.__mro__ if not issubclass(base, PlacedPatcher) and base not in ours)


def _is_all_ours(patcher: Any) -> bool:
    """Whether no code of a pack or of another node has run in a load."""
    loading = all(
        next(vars(base)[name] for base in type(patcher).__mro__[1:] if base is not PlacedPatcher and name in vars(base))
        is vars(PlacedLoading)[name]
        for name in ("load", "partially_load")
    )
    return loading and patcher.get_all_callbacks(CallbacksMP.ON_LOAD) == [_loaded]


def place(patcher: ModelPatcher, plan: Plan, states: ModelStates, *, fills: bool = False) -> ModelPatcher:
    """Make a static patcher that nobody else uses load its model by `plan`. Returns it.

    With `fills`, streamed blocks stay on the compute device as long as there is room for them.

    Raises InputError, and changes nothing, if it is no patcher of the host.
    """
    placed_class(type(patcher), states)
    patcher.load_device = torch_device(plan.compute)
    _adopt(patcher, Placed(plan, states, fills))
    states.of(patcher).pages.note(modules_of(patcher))
    return patcher


def _adopt(patcher: Any, placed: Placed) -> None:
    """Place a patcher, new or cloned: its class, what travels with its own clones, and its model's state.

    A pack's clone may share its dicts with the patcher that it was made from, so those are copied before they change.
    """
    cls = placed_class(type(patcher), placed.states)
    patcher.attachments = {**patcher.attachments, ATTACHMENT: placed}
    patcher.callbacks = {call: dict(by_key) for call, by_key in patcher.callbacks.items()}
    for call, function in ((CallbacksMP.ON_CLONE, _cloned), (CallbacksMP.ON_LOAD, _loaded)):
        patcher.remove_callbacks_with_key(call, ATTACHMENT)
        patcher.add_callback_with_key(call, ATTACHMENT, function)
    if placed.hoists:
        from .hoisted_runs import watch_runs  # not everywhere: it needs more of the host

        watch_runs(patcher, placed.states)
    patcher.__class__ = cls
    patcher.size = 0  # the host copies the size from a placed patcher, where it is the plan's; 0 makes it count again
    placed.states.of(patcher).adopt(patcher)


def inherit(clone: Any, patcher: Any) -> None:
    """Tell the host whose clone it is, where a pack's `clone` does not: when the clone is gone, that one unloads."""
    if getattr(clone, "parent", patcher) is None and clone is not patcher and clone.model is patcher.model:
        clone.parent = patcher


def _cloned(patcher: Any, clone: Any) -> None:
    """The host has cloned a placed patcher, perhaps without calling its own `clone`."""
    _adopt(clone, patcher.attachments[ATTACHMENT])


def _loaded(patcher: Any, *_: Any) -> None:
    """A patcher with a plan has been loaded. Raises PlacementNotApplied if it is not of a class that knows the plan.

    Packs can make such patchers in ways that we do not see: they set a class, or copy a patcher's attributes.
    """
    if not isinstance(patcher, PlacedPatcher):
        cls = type(patcher)
        raise PlacementNotApplied(
            f"{type(patcher.model).__name__} was placed, but a later node made a {cls.__name__} of it, which loads all "
            f"weights on {device_name(patcher.load_device)} ({cls.__module__}); put the place node after that node"
        )
