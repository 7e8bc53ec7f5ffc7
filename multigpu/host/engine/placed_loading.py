"""Loading by a plan, where the host's static patcher would load by its own rules.

In a placed patcher's order of resolution this class comes after a pack's own patcher class and before the host's: a
pack's `load` or `partially_load` runs as it does without a plan, and gets ours where it calls the host's.
"""

from __future__ import annotations

import logging
import time
from math import inf
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...devices.caches import trim_heap
from ...devices.torch_devices import device_name, torch_device
from ...plan import Plan, explain
from ...plan.spill import spilled
from ...stream.census import prove
from ...stream.residence import Progress, move
from ..progress import LoadingBar
from . import on_disk
from .blocks import modules_of
from .cast_weights import mark_loaded
from .donor_room import make_room
from .file_pages import in_file
from .hoisted_runs import COMPILED
from .model_states import ATTACHMENT, Loaded, ModelState, Placed
from .placed_patching import CALLED, PlacedPatching, returns_weights
from .spare_room import note_room, plan_within, spare_on_compute
from .static_clone import cast_pages

log = logging.getLogger("multigpu")


class PlacedLoading(PlacedPatching):
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
            if ATTACHMENT in self.attachments:
                cast_pages(self.model)
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        placed.states.settle()
        state = placed.states.of(self)
        state.adopt(self)  # a copy that a pack has made of a placed patcher is not known yet
        state.residence.recover()
        if self.model.current_weight_patches_uuid is not None and not self._is_ours(state):
            if state.holds(self.model) and (block := state.misplaced()) is not None:
                words = "[MultiGPU] other code has moved weights of %s, such as those of %s: they are placed again"
                log.warning(words, type(self.model).__name__, block)
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
            plan = on_disk.fitted(self, state, plan, patched=force_patch_weights or not returns_weights(type(self)))
            moved = not self._is_ours(state) or state.residence.plan != plan
            if moved:
                state.modules.update(modules_of(self))
            if moved or state.loaded is None or state.loaded.patches_uuid != self.patches_uuid:
                again = self._send_back(state)
                bar = LoadingBar(plan.total_bytes if moved else sum(plan[block].bytes for block in again))
                if moved:
                    plan = self._place(placed, state, plan, bar)
                    state.planned, state.expected = asked, plan.forecast if plan.streamed else None
                else:
                    self._come(state, bar)
                    state.residence.renew(again, state.modules, state.pages.holding)
                state.residence.forget_hoisted()
                self._bake(state)
                self._tell_host(state, plan, Loaded(self.patches_uuid))
            state.residence.told.passing = self.passing()
            if force_patch_weights or self._needs_all_at_once():
                state.residence.due.finish()
            state.residence.time_steps(cold=moved or state.residence.due.outstanding)
            state.residence.due.look()
            state.used = time.time()
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
        state.residence.recover()
        if not self._is_ours(state) or state.residence.plan is None or state.loaded is None:
            return 0
        before = self.loaded_size()
        wanted = memory_to_free - state.residence.release(memory_to_free)
        if wanted > 0:
            with self.use_ejected(), self._own_objects():
                plan = spilled(state.residence.plan, wanted, on_disk.able(state, state.residence.plan))
                plan = self._place(placed, state, plan, lambda count: None)
                if state.loaded.patches_uuid == self.patches_uuid:
                    self._bake(state)  # what was to get its patches later still is
                    self._tell_host(state, plan, state.loaded)
                else:
                    self._tell_host(state, plan, Loaded(None))
                state.residence.due.look()
        return before - self.loaded_size()

    # -- the steps of a load --------------------------------------------------------------------------------------

    def _is_ours(self, state: ModelState) -> bool:
        """Whether the model is loaded by a plan and nobody else has moved it since."""
        return state.holds(self.model) and state.residence.intact()

    def _place(self, placed: Placed, state: ModelState, plan: Plan, progress: Progress) -> Plan:
        """Carry out a plan, or as much of it as the donors have room for. Returns what is carried out.

        Blocks from the file may still be on their way afterwards. The bytes are counted when all have come.
        """
        plan = make_room(self.model, plan, state.in_file)
        if not self._is_ours(state) or state.residence.plan != plan:
            on_disk.take_patches_out(state, plan)
            state.count = None
            self._come(state, progress)
            with state.pages.moving():
                spare = spare_on_compute(placed, state, plan)
                pages = state.pages
                state.residence.apply(plan, state.modules, progress, pages.holding, pages.rest, spare)
                for placement in plan.placements:
                    state.pages.cast(placement.block, self.load_device)
            for placement in plan.placements:
                if placement.reason not in CALLED and state.residence.due.is_coming(placement.block):
                    state.residence.due.bring(placement.block)
            trim_heap()
        return plan

    def _come(self, state: ModelState, progress: Progress) -> None:
        """Say what is done for each block that comes from the model file, and when all have come.

        This patcher may be gone by then, and another one of the model be in use.
        """
        pages, patchers, compute = state.pages, state.patchers, self.load_device
        pages.expect()

        def came(block: str, count: int) -> None:
            pages.cast(block, compute)
            pages.came(block)
            progress(count)

        def settled() -> None:
            patcher = next((its for its in patchers if its.placed is not None), None)
            if patcher is not None:
                _prove(patcher.model, patcher.placed.states.of(patcher))
            if isinstance(progress, LoadingBar):
                progress.finish()

        told = state.residence.told
        told.came, told.settled = came, settled

    def _needs_all_at_once(self) -> bool:
        """Whether weights are used in other ways than by the modules' own forward, which shows when they are due."""
        compiled = COMPILED in self.wrappers.get(WrappersMP.APPLY_MODEL, {})
        replaced = any(name.partition(".")[0] == "diffusion_model" for name in self.object_patches_backup)
        return compiled or replaced or bool(self.injections or self.hook_patches)

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
        in_file = {placement.block for placement in plan.streamed if placement.home.is_disk}
        mark_loaded(self, {placement.block for placement in plan.streamed}, in_file)
        self.model.model_lowvram = True
        self.model.lowvram_patch_counter = 0
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = plan.bytes_on(plan.compute) + plan.ring_bytes
        self.model.model_offload_buffer_memory = plan.ring_bytes
        self.model.current_weight_patches_uuid = state.loaded = loaded


def _prove(model: torch.nn.Module, state: ModelState) -> None:
    """Count the bytes of a model that was placed, and say where they are. Raises PlacementNotApplied."""
    plan = state.residence.plan
    if plan is not None and state.count is None:
        state.count = prove(model, plan, in_file)
        log.info("[MultiGPU] %s: %s", type(model).__name__, explain.one_line(plan))
