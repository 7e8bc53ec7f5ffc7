"""Loading by a plan, where the host's static patcher would load by its own rules.

In a placed patcher's order of resolution this class comes after a pack's own patcher class and before the host's: a
pack's `load` or `partially_load` runs as it does without a plan, and gets ours where it calls the host's.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...devices.caches import trim_heap
from ...devices.torch_devices import device_name, torch_device
from ...plan import Plan, explain
from ...plan.spill import spilled
from ...stream.census import prove
from ...stream.file_reader import FileReader
from ...stream.layout import is_plain
from ...stream.originals import CarriedOriginal, FileOriginal, KeptOriginal, ModelFiles, Original, same_patches
from ...stream.residence import move
from ..model_files import files_of
from ..progress import LoadingBar
from . import on_disk
from .blocks import modules_of, split
from .cast_weights import mark_loaded
from .donor_room import make_room
from .file_pages import in_file
from .model_states import ATTACHMENT, Loaded, ModelState, Placed
from .spare_room import note_room, plan_within, spare_on_compute

log = logging.getLogger("multigpu")


class PlacedLoading(ModelPatcher):
    """Overrides what loads. Without a placement in force it is the host's class."""

    @property
    def placed(self) -> Placed | None:
        """The placement in force: none if the plan is for another compute device than this patcher's."""
        placed: Placed | None = self.attachments.get(ATTACHMENT)
        return placed if placed is not None and torch_device(placed.plan.compute) == self.load_device else None

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> float:
        placed = self.placed
        if placed is None:
            return super().partially_load(device_to, extra_memory, force_patch_weights)
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.loaded_size()
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            try:
                self.load(device_to, before + extra_memory, force_patch_weights=force_patch_weights)
            except BaseException:
                self.detach()
                raise
            return self.loaded_size() - before

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Bring every block to its home. Patches are baked in on the compute device, so no step applies them again.

        With less room on the compute device than the plan wants (`lowvram_model_memory`; no limit with `full_load`),
        more blocks go to RAM until it fits. Costs next to nothing when little has changed.
        """
        placed = self.placed
        if placed is None:
            if ATTACHMENT in self.attachments and self.model.current_weight_patches_uuid is None:
                words = "[MultiGPU] %s was placed for another device than %s, so it is loaded there without a plan"
                log.warning(words, type(self.model).__name__, device_name(self.load_device))
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        placed.states.settle()
        state = placed.states.of(self)
        state.adopt(self)  # a copy that a pack has made of a placed patcher is not known yet
        if self.model.current_weight_patches_uuid is not None and not self._is_ours(state):
            if state.holds(self.model):
                words = "[MultiGPU] other code has moved weights of %s, such as those of %s: they are placed again"
                log.warning(words, type(self.model).__name__, state.misplaced())
            self.unpatch_model(self.offload_device)
            self.patch_model(load_weights=False)
        with self.use_ejected(), self._own_objects():
            self.unpatch_hooks()
            state.successor_is_placed = False
            allowed = inf if full_load else max(0.0, lowvram_model_memory)
            note_room(self, placed, state, allowed)
            state.steps.learn(state.residence.times)
            asked = state.steps.plan_for(state.hoistable(placed.plan), type(self.model).__name__)
            in_force = state.residence.plan if self._is_ours(state) else None
            plan = plan_within(asked, in_force, allowed, placed, state)
            plan = on_disk.fitted(self, state, plan, patched=force_patch_weights or not _returns_weights(type(self)))
            moved = not self._is_ours(state) or state.residence.plan != plan
            if moved:
                state.modules.update(modules_of(self))
                bar = LoadingBar(plan.total_bytes)
                plan = self._place(placed, state, plan, bar)
                state.planned, state.expected = asked, plan.forecast if plan.streamed else None
                bar.finish()
            if moved or state.loaded is None or state.loaded.patches_uuid != self.patches_uuid:
                state.residence.forget_hoisted()
                self._bake(state)
                self._tell_host(state, plan, Loaded(self.patches_uuid))
            state.residence.time_steps(cold=moved)
            state.used = time.time()
            on_disk.patch_in_passing(self, state)
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
        before = self.loaded_size()
        wanted = memory_to_free - state.residence.release(memory_to_free)
        if wanted > 0:
            with self.use_ejected(), self._own_objects():
                plan = spilled(state.residence.plan, wanted, on_disk.able(state, state.residence.plan))
                self._tell_host(state, self._place(placed, state, plan), state.loaded)
        return before - self.loaded_size()

    # -- the steps of a load --------------------------------------------------------------------------------------

    def _is_ours(self, state: ModelState) -> bool:
        """Whether the model is loaded by a plan and nobody else has moved it since."""
        return state.holds(self.model) and state.residence.intact()

    def _place(
        self, placed: Placed, state: ModelState, plan: Plan, progress: Callable[[int], None] = lambda count: None
    ) -> Plan:
        """Carry out a plan, or as much of it as the donors have room for. Returns what was carried out."""
        plan = make_room(self.model, plan, state.in_file)
        if not self._is_ours(state) or state.residence.plan != plan:
            on_disk.take_patches_out(state, plan)
            state.count = None
            with state.pages.moving():
                spare = spare_on_compute(placed)
                pages = state.pages
                state.residence.apply(plan, state.modules, progress, pages.holding, pages.rest, spare)
            on_disk.patch_in_passing(self, state)
            trim_heap()
            state.count = prove(self.model, plan, in_file)
            log.info("[MultiGPU] %s: %s", type(self.model).__name__, explain.one_line(plan))
        return plan

    def _bake(self, state: ModelState) -> None:
        """Make the weights what the patches ask for; only weights whose patches changed are touched.

        The host's own table of originals (`backup`) says what is in the weights. An entry is made when its weight is
        patched and removed when its weight is restored, so that the table is right even if something in between fails.
        """
        stale = [key for key, original in self.backup.items() if not self._is_wanted(key, original)]
        fresh = [
            key for key in self.patches if key not in self.backup and not state.residence.is_in_file(split(key)[0])
        ]
        if not stale and not fresh:
            return
        files = ModelFiles(files_of(self))
        state.residence.changing()
        try:
            with FileReader(self.load_device) as reader:
                reader.expect(state.pages_of_originals(stale))
                for key in [*stale, *fresh]:
                    if key in self.patches:
                        self._bake_one(state, key, files, reader)
                    else:
                        state.restore(key, reader)
        finally:
            state.residence.changed()

    def _bake_one(self, state: ModelState, key: str, files: ModelFiles, reader: FileReader) -> None:
        original, patches = self.backup.get(key), tuple(self.patches[key])
        if isinstance(original, FileOriginal):  # patched anew from the file: nothing is restored first
            with original.reading() as stored:
                page = state.pages.of(key, original)
                unpatched = reader.on_device(page) if page is not None and reader.reads(page) else stored
                patched = self._patched_from(state, key, unpatched)
            state.rewrite(key, patched)
            self.backup[key] = replace(original, patches=patches)
            return
        if original is not None:
            state.restore(key, reader)
        if not _returns_weights(type(self)) and (carried := self._carried(state, key, patches)) is not None:
            self.backup[key] = carried
            return
        if isinstance(original, KeptOriginal):
            original = replace(original, patches=patches)
        else:
            original = state.pages.original(key, patches) or files.original(key, state.weight(key), patches)
        state.rewrite(key, self._patched(state, key))
        self.backup[key] = original

    def patched_in_passing(self, key: str) -> torch.Tensor:
        """A weight from the model file, which the model has on the compute device now, with this patcher's patches."""
        covered = any(key.startswith(f"{name}.") for name in self.object_patches_backup)
        with self._own_objects() if covered else nullcontext():
            patched: torch.Tensor = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
        return patched

    def _patched(self, state: ModelState, key: str) -> torch.Tensor:
        """A weight with this patcher's patches, on the compute device. The model keeps the one it has."""
        if _returns_weights(type(self)):
            patched: torch.Tensor = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
            return patched
        return self._patched_in_place(state, key, self.load_device)

    def _patched_from(self, state: ModelState, key: str, unpatched: torch.Tensor) -> torch.Tensor:
        """`_patched`, of another tensor than the one that the model has."""
        weight = state.weight(key)
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


def _returns_weights(cls: type[ModelPatcher]) -> bool:
    """Whether `patch_weight_to_device` can return the weight, as the host's does. Packs override it without that."""
    return "return_weight" in inspect.signature(cls.patch_weight_to_device).parameters
