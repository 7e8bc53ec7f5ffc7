"""The patches of a placed model: when they are computed, what the weights were before, and who says so.

Weights that are pages of their file get their patches when they are first used, on the compute device, and go on to
their homes with them (`passing`). All others are patched when the model is loaded.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import comfy.lora
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ...devices.backends import free_bytes
from ...devices.caches import clear_caches, failed_allocations
from ...devices.torch_devices import device_id, device_name
from ...errors import DeviceError, HostError
from ...plan import CPU, Reason
from ...stream.layout import copy_to, is_plain
from ...stream.originals import CarriedOriginal, FileOriginal, KeptOriginal, ModelFiles, Original, same_patches
from ...stream.residence import RAM
from ...units import format_bytes
from ..model_files import files_of
from .blocks import join, late_dtype, split
from .model_states import ModelState

_Result = TypeVar("_Result")
Passing = Callable[[str, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]

CALLED = (Reason.RESIDENT, Reason.LOW_INTENSITY, Reason.STREAMED, Reason.HOISTED)
"""Blocks of which the host's code uses the weights only in their own forward, so that a hook sees their first use.

Not tiny ones: some models read the weight of a norm without calling the norm.
"""


class PlacedPatching(ModelPatcher):
    """What a placed patcher does with patches. `PlacedLoading` calls it."""

    placed: Any

    def _send_back(self, state: ModelState) -> set[str]:
        """Let blocks whose patches are not the wanted ones rest in the pages of their file, where their originals are.

        Nothing is copied. They are to come again. Returns them.
        """
        stale = {split(key)[0] for key, original in self.backup.items() if not self._is_wanted(key, original)}
        if not stale or state.residence.compute.type != "cuda":
            return set()
        blocks = stale & state.in_pages()
        state.residence.changing()
        for block in blocks:
            state.rest_block(block)
        return blocks

    def _bake(self, state: ModelState) -> None:
        """Make the weights what the patches ask for, or see to it that they are when they are first used.

        Only weights whose patches changed are touched. The host's own table of originals (`backup`) says what is in the
        weights. An entry is made when its weight is patched and removed when its weight is restored, so that the table
        is right even if something in between fails.
        """
        stale = [key for key, original in self.backup.items() if not self._is_wanted(key, original)]
        fresh = [
            key for key in self.patches if key not in self.backup and not state.residence.is_in_file(split(key)[0])
        ]
        later = {key for key in fresh if self._can_wait(state, key)}
        now = [key for key in (*stale, *fresh) if key not in later]
        if now or later:
            state.residence.changing()
        state.residence.due.await_patches({split(key)[0] for key in later}, state.modules)
        if not now:
            return
        files = ModelFiles(files_of(self))
        try:
            for key in now:
                if state.residence.due.is_coming(split(key)[0]):
                    state.residence.due.bring(split(key)[0])
                if key in self.patches:
                    self._bake_one(state, key, files)
                else:
                    state.restore(key)
        finally:
            state.residence.changed()

    def passing(self) -> Passing:
        """Gives the weights of a block that is on the compute device this patcher's patches.

        They are the block's weights from then on, and the host's table says so; but not for a block that rests in the
        file.
        """
        own, uuid = weakref.ref(self), self.patches_uuid
        patchers = self.placed.states.of(self).patchers

        def passing(block: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            alike = (own(), *(its for its in patchers if its.patches_uuid == uuid))
            patcher = next((its for its in alike if its is not None and its.placed is not None), None)
            if patcher is None:
                raise HostError(
                    f"{block} was to get its patches (LoRAs) when it is first used, but the model with these patches "
                    "is gone; run the workflow again"
                )
            patched, state = dict[str, torch.Tensor](), patcher.placed.states.of(patcher)
            stays = not state.residence.is_in_file(block)
            for name, tensor in tensors.items():
                key = join(block, name)
                if key in patcher.patches and key not in patcher.backup:
                    patches = tuple(patcher.patches[key])
                    patched[name] = patcher.patched_from(state, key, tensor)
                    if stays:
                        original = state.pages.original(key, patches)
                        kept = original or KeptOriginal(copy_to(tensor, RAM), patches)  # if the file has changed
                        state.rewrite(key, patched[name])
                        patcher.backup[key] = kept
            return patched

        return passing

    def _can_wait(self, state: ModelState, key: str) -> bool:
        """Whether a weight can get its patches when it is first used."""
        block, _ = split(key)
        plan = state.residence.plan
        if plan is None or block not in plan or state.residence.compute.type != "cuda":
            return False
        if plan[block].home not in (plan.compute, CPU) or plan[block].reason not in CALLED:
            return False
        if not returns_weights(type(self)) or state.pages.original(key, ()) is None:
            return False
        weight = state.weight(key)
        return bool(comfy.lora.calculate_shape(self.patches[key], weight, key) == weight.shape)

    def _bake_one(self, state: ModelState, key: str, files: ModelFiles) -> None:
        original, patches = self.backup.get(key), tuple(self.patches[key])
        if isinstance(original, FileOriginal):  # patched anew from the file: nothing is restored first
            with original.reading() as stored:
                patched = self.patched_from(state, key, stored)
            state.rewrite(key, patched)
            self.backup[key] = replace(original, patches=patches)
            return
        if original is not None:
            state.restore(key)
        if not returns_weights(type(self)) and (carried := self._carried(state, key, patches)) is not None:
            self.backup[key] = carried
            return
        if isinstance(original, KeptOriginal):
            original = replace(original, patches=patches)
        else:
            original = state.pages.original(key, patches) or files.original(key, state.weight(key), patches)
        state.rewrite(key, self._patched(state, key))
        self.backup[key] = original

    def _patched(self, state: ModelState, key: str) -> torch.Tensor:
        """A weight with this patcher's patches, on the compute device. The model keeps the one it has."""
        if not returns_weights(type(self)):
            return self._patched_in_place(state, key, self.load_device)
        block, name = split(key)
        weight = state.weight(key)
        wanted = late_dtype(state.modules[block], name, weight)
        if wanted is not None:  # patches are rounded to the type in which the weight is used
            return self.patched_from(state, key, weight.to(self.load_device, wanted))
        covered = any(key.startswith(f"{name}.") for name in self.object_patches_backup)

        def patch() -> torch.Tensor:
            with self._own_objects() if covered else nullcontext():
                patched: torch.Tensor = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
            return patched

        return self._complete(state, key, patch)

    def _complete(self, state: ModelState, key: str, patch: Callable[[], _Result]) -> _Result:
        """What `patch` returns, with all patches in it.

        The host leaves out a patch for which the device has no memory, and only logs that. So this looks at what the
        device's allocator says, makes room, and tries again. Raises DeviceError if there is none.
        """
        device = device_id(self.load_device)
        for _ in range(2):
            before = failed_allocations(device)
            try:
                patched = patch()
            except RuntimeError:  # torch.OutOfMemoryError is one; other backends raise their own
                if failed_allocations(device) == before:
                    raise
            if failed_allocations(device) == before:
                return patched
            state.residence.release(float("inf"))
            clear_caches([device])
        raise DeviceError(
            f"{device_name(self.load_device)} has no room to apply the patches (LoRAs) of {key}, with "
            f"{format_bytes(free_bytes(device) or 0)} free and {format_bytes(12 * state.weight(key).numel())} needed; "
            "leave more of it free: choose mode auto, write a smaller amount for it, or more virtual VRAM"
        )

    def patched_from(self, state: ModelState, key: str, unpatched: torch.Tensor) -> torch.Tensor:
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
            self._complete(state, key, lambda: self.patch_weight_to_device(key, device_to=device))
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


def returns_weights(cls: type[ModelPatcher]) -> bool:
    """Whether `patch_weight_to_device` can return the weight, as the host's does. Packs override it without that."""
    return "return_weight" in inspect.signature(cls.patch_weight_to_device).parameters
