"""A model patcher that keeps its model where a plan puts it.

`PlacedPatcher` is mixed into the host's static patcher class (or a pack's own subclass of it) at run time. The plan
travels with clones in `attachments`; what is true of the model itself (where its blocks rest, which patches are baked
in) is shared by all clones of one model, in `ModelState`. Without a plan for its load device a patcher behaves as the
class it was made from: that is how core's clones for other devices come out right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from comfy import model_management
from comfy.patcher_extension import CallbacksMP

from ..devices.caches import trim_heap
from ..errors import HostError
from ..plan import CPU, Plan, explain
from ..plan.spill import relieved, spilled
from ..stream.census import bytes_by_device
from ..stream.residence import torch_device
from ..units import format_bytes
from .blocks import ROOT, modules_of
from .marks import mark_loaded
from .model_states import ATTACHMENT, ModelState, ModelStates, Patches, Placed
from .originals import FileOriginal, ModelFiles
from .progress import LoadingBar
from .proof import prove

log = logging.getLogger("multigpu")


class PlacedPatcher:
    """Mixed in before a host patcher class. Overrides what loads, unloads and counts."""

    # provided by the host's class
    model: Any
    patches: dict[str, Any]
    backup: dict[str, Any]
    attachments: dict[str, Any]
    load_device: torch.device
    offload_device: torch.device
    patches_uuid: Any
    hook_backup: dict[str, Any]
    forced_hooks: Any

    @property
    def placed(self) -> Placed | None:
        """The placement in force: none if the plan is for another compute device than this patcher's."""
        placed: Placed | None = self.attachments.get(ATTACHMENT)
        return placed if placed is not None and torch_device(placed.plan.compute) == self.load_device else None

    def __del__(self) -> None:
        """With the last placed patcher of a model goes its placement; the host may hold on to an unplaced parent."""
        super().__del__()  # type: ignore[misc]
        placed = self.placed
        if placed is not None and all(other is self for other in placed.states.of(self).patchers):
            placed.states.of(self).residence.forget()

    def model_size(self) -> int:
        placed = self.placed
        if placed is None:
            return super().model_size()  # type: ignore[misc]
        return placed.plan.bytes_on(placed.plan.compute) + placed.plan.ring_bytes

    def model_patches_models(self) -> Any:
        """What the host asks first when it loads models. From then on it marks those that it loads together."""
        placed = self.placed
        if placed is not None:
            donors = [home for home in placed.plan.bytes_by_home() if home not in (CPU, placed.plan.compute)]
            for entry in (entry for home in donors for entry in _loaded_on(torch_device(home))):
                entry.currently_used = False
        return super().model_patches_models()  # type: ignore[misc]

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> float:
        placed = self.placed
        if placed is None:
            return super().partially_load(device_to, extra_memory, force_patch_weights)  # type: ignore[misc]
        with self.use_ejected(skip_and_inject_on_exit_only=True):  # type: ignore[attr-defined]
            before = self.model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)  # type: ignore[attr-defined]
            try:
                self.load(device_to, before + extra_memory, force_patch_weights)
            except BaseException:
                self.detach()  # type: ignore[attr-defined]
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
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)  # type: ignore[misc]
        with self.use_ejected():  # type: ignore[attr-defined]
            self.unpatch_hooks()
            state = placed.states.of(self)
            if state.broken is not None:
                raise HostError(state.broken)
            excess = 0 if full_load or not lowvram_model_memory else self.model_size() - lowvram_model_memory
            plan = spilled(placed.plan, excess)
            moved = not self._is_ours(state) or state.residence.plan != plan
            if moved:
                bar = LoadingBar(plan.total_bytes)
                plan = self._place(placed, state, plan, bar)
                bar.finish()
            if moved or self.model.current_weight_patches_uuid != self.patches_uuid:
                self._bake(state)
                self._tell_host(state, plan)
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):  # type: ignore[attr-defined]
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)  # type: ignore[attr-defined]

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> float:
        placed = self.placed
        if placed is None:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)  # type: ignore[misc]
        state = placed.states.of(self)
        if not self._is_ours(state) or state.residence.plan is None:
            return 0
        with self.use_ejected():  # type: ignore[attr-defined]
            before, plan = state.loaded_bytes, spilled(state.residence.plan, memory_to_free)
            self._tell_host(state, self._place(placed, state, plan))
            return before - state.loaded_bytes

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        placed = self.placed
        if placed is not None and unpatch_weights:
            self._leave(placed.states.of(self))
        return super().unpatch_model(device_to, unpatch_weights)  # type: ignore[misc]

    def patch_hooks(self, hooks: Any) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).patch_hooks(hooks), hooks is not None)  # type: ignore[misc]

    def unpatch_hooks(self, whitelist_keys_set: Any = None) -> Any:
        return self._change_by_hooks(lambda: super(PlacedPatcher, self).unpatch_hooks(whitelist_keys_set), False)  # type: ignore[misc]

    # -- the steps of a load --------------------------------------------------------------------------------------

    def _is_ours(self, state: ModelState) -> bool:
        """Whether the model is loaded by a plan and nobody else has moved it since."""
        return state.residence.intact() and bool(self.model.model_loaded_weight_memory == state.loaded_bytes)

    def _place(
        self, placed: Placed, state: ModelState, plan: Plan, progress: Callable[[int], None] = lambda count: None
    ) -> Plan:
        """Carry out a plan, or as much of it as the donors have room for. Returns what was carried out."""
        if self.model.current_weight_patches_uuid is not None and not self._is_ours(state):
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        placed.states.leave_other_devices(self)
        plan = self._make_room(plan)
        if not self._is_ours(state) or state.residence.plan != plan:
            state.residence.apply(plan, modules_of(self), progress, poison=placed.poison)
            trim_heap()
            state.counted = prove(self.model, plan)
            log.info("[MultiGPU] %s: %s", type(self.model).__name__, explain.one_line(plan))
        return plan

    def _make_room(self, plan: Plan) -> Plan:
        """Unload other models from the donors as far as the plan needs, but none that is loaded along with this one.

        Those need memory to compute in, too. What then has no room on a donor goes to RAM.
        """
        resting = bytes_by_device(self.model)
        for home, count in plan.bytes_by_home().items():
            if home in (CPU, plan.compute):
                continue
            device = torch_device(home)
            in_use = [entry for entry in _loaded_on(device) if getattr(entry, "currently_used", False)]
            need = count - resting.get(device, 0)
            need += model_management.minimum_inference_memory() if in_use and need > 0 else 0
            if model_management.get_free_memory(device) >= need:
                continue
            model_management.free_memory(need, device, keep_loaded=in_use)
            short = need - model_management.get_free_memory(device)
            if short > 0:
                words = "[MultiGPU] %s has %s less room than the plan wants; that much of %s rests in RAM instead"
                log.warning(words, home, format_bytes(int(short)), type(self.model).__name__)
                plan = relieved(plan, home, short)
        return plan

    def _bake(self, state: ModelState) -> None:
        """Make the weights what the patches ask for; only weights whose patches changed are touched."""
        stale = [key for key, done in state.baked.items() if not _same(done, self.patches.get(key, ()))]
        fresh = [key for key in self.patches if key not in state.baked]
        if not stale and not fresh:
            return
        files = ModelFiles(self)
        state.residence.changing()
        for key in stale:
            self._rewrite(state, key, self.backup.pop(key).weight)
            del state.baked[key]
        for key in [*stale, *fresh]:
            if key in self.patches:
                self.backup[key] = files.original(key, self._weight(key))
                patched = self.patch_weight_to_device(  # type: ignore[attr-defined]
                    key, device_to=self.load_device, return_weight=True
                )
                self._rewrite(state, key, patched)
                state.baked[key] = tuple(self.patches[key])
        state.residence.changed()

    def _leave(self, state: ModelState) -> None:
        """Stop streaming; put unpatched weights back where blocks rest away from the compute device.

        The host restores all others, and all of them if it has loaded the model since.
        """
        for key, original in [*self.backup.items()]:
            if isinstance(original, FileOriginal) and not original.readable:
                state.broken = original.complaint
                del self.backup[key]
        if self._is_ours(state):
            state.residence.changing()
            for key in state.baked:
                if key in self.backup and state.residence.rests_away(_split(key)[0]):
                    self._rewrite(state, key, self.backup.pop(key).weight)
        state.baked.clear()
        state.loaded_bytes = 0
        state.residence.leave()

    def _rewrite(self, state: ModelState, key: str, tensor: torch.Tensor) -> None:
        block, name = _split(key)
        state.residence.rewrite(block, self._module(block), name, tensor)

    def _module(self, block: str) -> torch.nn.Module:
        module: torch.nn.Module = self.model if block == ROOT else self.model.get_submodule(block)
        return module

    def _weight(self, key: str) -> torch.Tensor:
        block, name = _split(key)
        weight: torch.Tensor = getattr(self._module(block), name)
        return weight

    def _tell_host(self, state: ModelState, plan: Plan) -> None:
        """The marks and numbers by which the host knows what is loaded."""
        mark_loaded(self, {placement.block for placement in plan.streamed})
        state.loaded_bytes = plan.bytes_on(plan.compute) + plan.ring_bytes
        self.model.model_lowvram = True
        self.model.lowvram_patch_counter = 0
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = state.loaded_bytes
        self.model.model_offload_buffer_memory = plan.ring_bytes
        self.model.current_weight_patches_uuid = self.patches_uuid

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


def _loaded_on(device: torch.device) -> list[Any]:
    """The entries of the host's list that compute on a device."""
    return [entry for entry in model_management.current_loaded_models if entry.device == device]


def placed_class(cls: type, states: ModelStates) -> type:
    """`cls` with placement mixed in; the same class each time."""
    if issubclass(cls, PlacedPatcher):
        return cls
    if cls not in states.classes:
        states.classes[cls] = type("Placed" + cls.__name__, (PlacedPatcher, cls), {})
    return states.classes[cls]


def _same(done: Patches, wanted: Any) -> bool:
    """Whether two lists of patches do the same: equal numbers, the very same patch objects."""
    return len(done) == len(wanted) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] and a[3] == b[3] and a[4] is b[4]
        for a, b in zip(done, wanted, strict=True)
    )


def _split(key: str) -> tuple[str, str]:
    """A host key as (block, tensor name)."""
    block, _, name = key.rpartition(".")
    return block or ROOT, name
