"""A model patcher that keeps its model where a plan puts it.

`PlacedPatcher` is mixed into the host's static patcher class (or a pack's own subclass of it) at run time. The plan
travels with clones in `attachments`; what is true of the model itself (where its blocks rest, which patches are baked
in) is shared by all clones of one model, in `ModelState`. Without a plan for its load device a patcher behaves as the
class it was made from: that is how core's clones for other devices come out right.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...devices.caches import trim_heap
from ...devices.torch_devices import torch_device
from ...errors import PlacementNotApplied
from ...plan import CPU, Plan, explain
from ...plan.spill import spilled
from ...stream.census import prove
from ...stream.layout import is_plain
from ...stream.originals import CarriedOriginal, FileOriginal, KeptOriginal, ModelFiles, Original, same_patches
from ...stream.residence import move
from ..loaded_models import entries
from ..model_files import files_of
from ..progress import LoadingBar
from .blocks import modules_of
from .cast_weights import mark_loaded
from .donor_room import make_room
from .model_states import ATTACHMENT, Loaded, ModelState, ModelStates, Placed

if TYPE_CHECKING:
    Base = ModelPatcher
else:
    Base = object  # the host's own class comes after `PlacedPatcher` in the order of resolution

log = logging.getLogger("multigpu")


class PlacedPatcher(Base):
    """Mixed in before a host patcher class. Overrides what loads, unloads and counts."""

    @property
    def placed(self) -> Placed | None:
        """The placement in force: none if the plan is for another compute device than this patcher's."""
        placed: Placed | None = self.attachments.get(ATTACHMENT)
        return placed if placed is not None and torch_device(placed.plan.compute) == self.load_device else None

    def __del__(self) -> None:
        """Drops the plan first, so that the host's code does not unload the model: another clone may have loaded it."""
        self.attachments.pop(ATTACHMENT, None)
        super().__del__()

    def clone(self, *arguments: Any, **named: Any) -> Any:
        """A clone is placed as this patcher is, whatever a pack's own `clone` has made of it."""
        clone = super().clone(*arguments, **named)
        placed = self.attachments.get(ATTACHMENT)
        if placed is not None:
            _adopt(clone, placed)
        return clone

    def model_size(self) -> int:
        placed = self.placed
        if placed is None:
            return super().model_size()
        return placed.plan.bytes_on(placed.plan.compute) + placed.plan.ring_bytes

    def model_patches_models(self) -> Any:
        """The host calls this first when it loads models. Later it marks those that it loads together.

        So marks (`currently_used`) that an earlier load has left on models on the donors are removed here.
        """
        placed = self.placed
        if placed is not None:
            donors = [home for home in placed.plan.bytes_by_home() if home not in (CPU, placed.plan.compute)]
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
        return super().detach(unpatch_all)

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> float:
        placed = self.placed
        if placed is None:
            return super().partially_load(device_to, extra_memory, force_patch_weights)
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            try:
                self.load(device_to, before + extra_memory, force_patch_weights)
            except BaseException:
                self.detach()
                raise
            return self.model.model_loaded_weight_memory - before

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Bring every block to its home. Patches are baked in on the compute device, so no step applies them again.

        With less room on the compute device than the plan wants (`lowvram_model_memory`, 0 for no limit), more blocks
        go to RAM until it fits. Costs next to nothing when nothing has changed.
        """
        placed = self.placed
        if placed is None:
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        placed.states.settle()
        state = placed.states.of(self)
        if self.model.current_weight_patches_uuid is not None and not self._is_ours(state):
            self.unpatch_model(self.offload_device)
            self.patch_model(load_weights=False)
        with self.use_ejected(), self._own_objects():
            self.unpatch_hooks()
            state.successor_is_placed = False
            excess = 0 if full_load or not lowvram_model_memory else self.model_size() - lowvram_model_memory
            plan = spilled(placed.plan, excess)
            moved = not self._is_ours(state) or state.residence.plan != plan
            if moved:
                state.modules.update(modules_of(self))
                bar = LoadingBar(plan.total_bytes)
                plan = self._place(placed, state, plan, bar)
                bar.finish()
            if moved or state.loaded is None or state.loaded.patches_uuid != self.patches_uuid:
                self._bake(state)
                self._tell_host(state, plan, Loaded(self.patches_uuid))
        with self.use_ejected():
            self._move_patched_objects(self.load_device)
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> float:
        placed = self.placed
        if placed is None:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        state = placed.states.of(self)
        if not self._is_ours(state) or state.residence.plan is None or state.loaded is None:
            return 0
        with self.use_ejected(), self._own_objects():
            before, plan = self.model.model_loaded_weight_memory, spilled(state.residence.plan, memory_to_free)
            self._tell_host(state, self._place(placed, state, plan), state.loaded)
            return before - self.model.model_loaded_weight_memory

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        placed = self.placed
        if placed is None or not unpatch_weights:
            return super().unpatch_model(device_to, unpatch_weights)
        self._move_patched_objects(device_to or self.offload_device)
        super().unpatch_model(unpatch_weights=False)  # the model's own modules, whose names we know
        self.unpatch_hooks()
        state = placed.states.of(self)
        lost = state.leave()
        for key in lost:
            del self.backup[key]
        if (device_to or self.offload_device).type == "cpu":
            state.rest_in_pages(lost)
        result = super().unpatch_model(device_to, unpatch_weights)
        if lost:  # the next load must ask for exactly these patches; any other raises the error about the changed file
            self.backup.update(lost)
            self.model.current_weight_patches_uuid = Loaded(None)
        return result

    def patch_hooks(self, hooks: Any) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).patch_hooks(hooks), hooks is not None)

    def unpatch_hooks(self, whitelist_keys_set: Any = None) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).unpatch_hooks(whitelist_keys_set), False)

    # -- the steps of a load --------------------------------------------------------------------------------------

    def _is_ours(self, state: ModelState) -> bool:
        """Whether the model is loaded by a plan and nobody else has moved it since."""
        return state.holds(self.model) and state.residence.intact()

    def _place(
        self, placed: Placed, state: ModelState, plan: Plan, progress: Callable[[int], None] = lambda count: None
    ) -> Plan:
        """Carry out a plan, or as much of it as the donors have room for. Returns what was carried out."""
        plan = make_room(self.model, plan)
        if not self._is_ours(state) or state.residence.plan != plan:
            with state.moving():
                state.residence.apply(plan, state.modules, progress, state.page)
            trim_heap()
            prove(self.model, plan)
            log.info("[MultiGPU] %s: %s", type(self.model).__name__, explain.one_line(plan))
        return plan

    def _bake(self, state: ModelState) -> None:
        """Make the weights what the patches ask for; only weights whose patches changed are touched.

        The host's own table of originals (`backup`) says what is in the weights. An entry is made when its weight is
        patched and removed when its weight is restored, so that the table is right even if something in between fails.
        """
        stale = [key for key, original in self.backup.items() if not self._is_wanted(key, original)]
        fresh = [key for key in self.patches if key not in self.backup]
        if not stale and not fresh:
            return
        files = ModelFiles(files_of(self))
        state.residence.changing()
        for key in [*stale, *fresh]:
            original = self.backup.get(key)
            if original is not None and not (key in self.patches and isinstance(original, FileOriginal)):
                state.restore(key)
            if key in self.patches:
                patches = tuple(self.patches[key])
                if not _returns_weights(type(self)) and (carried := self._carried(state, key, patches)) is not None:
                    self.backup[key] = carried
                    continue
                if isinstance(original, FileOriginal):
                    patched = self._patched_from(state, key, original)
                else:
                    patched = self._patched(state, key)
                if isinstance(original, FileOriginal | KeptOriginal):
                    original = replace(original, patches=patches)
                else:
                    original = state.in_file(key, patches) or files.original(key, state.weight(key), patches)
                state.rewrite(key, patched)
                self.backup[key] = original
        state.residence.changed()

    def _patched(self, state: ModelState, key: str) -> torch.Tensor:
        """A weight with this patcher's patches, on the compute device. The model keeps the one it has."""
        if _returns_weights(type(self)):
            patched: torch.Tensor = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
            return patched
        return self._patched_in_place(state, key, self.load_device)

    def _patched_from(self, state: ModelState, key: str, original: FileOriginal) -> torch.Tensor:
        """`_patched`, of a weight that holds other patches: its original is taken from the file, and not restored."""
        weight = state.weight(key)
        with original.reading() as unpatched:
            state.put(key, unpatched)
            try:
                return self._patched(state, key)
            finally:
                state.put(key, weight)

    def _patched_in_place(self, state: ModelState, key: str, device: torch.device) -> torch.Tensor:
        """What a pack's own `patch_weight_to_device` puts into the model. The model gets back the weight it had."""
        weight = state.weight(key)
        try:
            self.patch_weight_to_device(key, device_to=device)
            return state.weight(key)
        finally:
            self.backup.pop(key, None)  # its copy of the weight; ours is made by the caller
            state.put(key, weight)

    def _carried(self, state: ModelState, key: str, patches: Any) -> CarriedOriginal | None:
        """Let a pack's tensor carry the patches of a weight, if that is how the pack patches it; None if it is not."""
        weight = state.weight(key)
        if is_plain(weight):
            return None
        before = dict(weight.__dict__)
        patched = self._patched_in_place(state, key, weight.device)
        if patched.data_ptr() != weight.data_ptr():
            weight.__dict__.clear()
            weight.__dict__.update(before)
            return None
        weight.__dict__.update(patched.__dict__)
        return state.carried(key, before, patches)

    def _is_wanted(self, key: str, original: Any) -> bool:
        """Whether a weight holds just the patches that this patcher asks for. False for the host's own entries."""
        return isinstance(original, Original) and same_patches(original.patches, self.patches.get(key, ()))

    @contextmanager
    def _own_objects(self) -> Iterator[None]:
        """The model's own modules and attributes, without what object patches have put in their place."""
        patched = [
            (name, comfy.utils.set_attr(self.model, name, original))
            for name, original in reversed(self.object_patches_backup.items())
        ]
        try:
            yield
        finally:
            for name, patch in reversed(patched):
                comfy.utils.set_attr(self.model, name, patch)

    def _move_patched_objects(self, device: torch.device) -> None:
        """Move modules that object patches have added, and that are in no plan, to `device`."""
        for name, original in self.object_patches_backup.items():
            patch = comfy.utils.get_attr(self.model, name)
            if isinstance(patch, torch.nn.Module):
                own = {*original.modules()} if isinstance(original, torch.nn.Module) else set()
                for module in patch.modules():
                    if module not in own:
                        move(module, device)

    def _tell_host(self, state: ModelState, plan: Plan, loaded: Loaded) -> None:
        """The marks and numbers by which the host knows what is loaded."""
        mark_loaded(self, {placement.block for placement in plan.streamed})
        self.model.model_lowvram = True
        self.model.lowvram_patch_counter = 0
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = plan.bytes_on(plan.compute) + plan.ring_bytes
        self.model.model_offload_buffer_memory = plan.ring_bytes
        self.model.current_weight_patches_uuid = state.loaded = loaded

    def _change_by_hooks(self, change: Callable[[], Any], expected: bool) -> Any:
        """Weight hooks write into the weights between steps: nothing staged before may be used after."""
        placed = self.placed
        if placed is None or not (expected or self.hook_backup):
            return change()
        residence = placed.states.of(self).residence
        residence.changing()
        result = change()
        residence.changed()
        return result


def placed_class(cls: type, states: ModelStates) -> type:
    """`cls` with placement mixed in; the same class each time."""
    if issubclass(cls, PlacedPatcher):
        return cls
    if cls not in states.classes:
        states.classes[cls] = type("Placed" + cls.__name__, (PlacedPatcher, cls), {})
    return states.classes[cls]


def _returns_weights(cls: type[ModelPatcher]) -> bool:
    """Whether `patch_weight_to_device` can return the weight, as the host's does. Packs override it without that."""
    return "return_weight" in inspect.signature(cls.patch_weight_to_device).parameters


def place(patcher: ModelPatcher, plan: Plan, states: ModelStates) -> ModelPatcher:
    """Make a static patcher that nobody else uses load its model by `plan`. Returns it."""
    patcher.load_device = torch_device(plan.compute)
    _adopt(patcher, Placed(plan, states))
    states.of(patcher).note_pages(modules_of(patcher))
    return patcher


def _adopt(patcher: Any, placed: Placed) -> None:
    """Place a patcher, new or cloned: its class, what travels with its own clones, and its model's state."""
    patcher.attachments[ATTACHMENT] = placed
    for call, function in ((CallbacksMP.ON_CLONE, _cloned), (CallbacksMP.ON_LOAD, _loaded)):
        patcher.remove_callbacks_with_key(call, ATTACHMENT)
        patcher.add_callback_with_key(call, ATTACHMENT, function)
    patcher.__class__ = placed_class(type(patcher), placed.states)
    patcher.size = 0  # the host copies the size from a placed patcher, where it is the plan's; 0 makes it count again
    placed.states.of(patcher).patchers.add(patcher)


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
            f"weights on {patcher.load_device} ({cls.__module__}); put the place node after that node"
        )
