"""The state of placed models, shared by all clones of their patchers."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import HostError
from ...plan import Plan
from ...stream.file_reader import FileReader
from ...stream.homes import moved
from ...stream.layout import is_plain
from ...stream.originals import CarriedOriginal, FileOriginal, Original
from ...stream.pages import Page, file_stamp
from ...stream.residence import RAM, Residence, move
from ..loaded_models import entries, hand_over, take_out
from .blocks import ROOT

ATTACHMENT = "multigpu.placement"
"""The key under which a patcher's `attachments` hold its `Placed`."""


FILE_SLICE = "_comfy_tensor_file_slice"
"""An attribute of the storage of a mapped weight: the open file, a lock, where its bytes begin, how many they are."""


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
    pages: dict[str, Page] = field(default_factory=dict)
    """The weights that were in the pages of the model file when the model was read, by host key."""
    _copied: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of these, the copies with the same bytes that are in the model, as `_mark` describes them."""
    successor_is_placed: bool = False
    """Whether the patcher that the host is about to load in place of the loaded one is placed, too."""

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
        self.residence.leave(lambda block, name: self._rest(_join(block, name)))
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

    def note_pages(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Remember which weights are in the pages of their file now, just after the model was read."""
        self.modules.update(modules)
        for block, module in modules.items():
            for name, weight in module._parameters.items():
                page = None if weight is None else _page_of(weight)
                if page is not None:
                    self.pages[_join(block, name)] = page

    def in_file(self, key: str, patches: Any) -> FileOriginal | None:
        """The original of an unpatched weight that came from the pages of its file; None for others."""
        page = self.pages.get(key)
        return FileOriginal(page, key, page.tensor.dtype, patches) if page and self.is_as_in_file(key) else None

    def rest_in_pages(self, patched: Container[str]) -> None:
        """Let the weights that are on the compute device rest in their file again, except those that are patched.

        So nothing is copied to RAM. A weight whose memory other code has replaced or changed is not touched.
        """
        for key in [key for key in self.pages if key not in patched]:
            if self.weight(key).device != RAM:
                self._rest(key)

    def _rest(self, key: str) -> bool:
        """Let one weight rest in its file again. False if that is not possible: it has none, or not these bytes."""
        if not self.is_as_in_file(key):
            return False
        self.put(key, moved(self.weight(key), self.pages[key].tensor))
        return True

    def is_as_in_file(self, key: str) -> bool:
        """Whether a weight has the bytes of its page: it is there, or was copied from there and is unchanged since."""
        page = self.pages.get(key)
        if page is None or page.changed:
            return False
        weight = self.weight(key)
        return weight.data_ptr() == page.tensor.data_ptr() or self._copied.get(key) == _mark(weight)

    def page(self, block: str, name: str) -> Page | None:
        """The page that a weight is in now; None for one that is elsewhere."""
        page = self.pages.get(_join(block, name))
        here = page is not None and self.weight(_join(block, name)).data_ptr() == page.tensor.data_ptr()
        return page if here else None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While weights are moved: those that were as in the file are so afterwards.

        Raises HostError, before anything is moved, if a weight is in a file that has changed since it was loaded, and
        afterwards if one of the files has changed meanwhile.
        """
        known = [key for key in self.pages if self.is_as_in_file(key)]
        in_pages = [key for key, page in self.pages.items() if self.weight(key).data_ptr() == page.tensor.data_ptr()]
        for key in in_pages:
            self.pages[key].check(key)
        yield
        for key in in_pages:
            self.pages[key].check(key)
        self._copied.update((key, _mark(self.weight(key))) for key in known)

    def weight(self, key: str) -> torch.Tensor:
        """The present weight behind a host key."""
        block, name = _split(key)
        weight: torch.Tensor = getattr(self.modules[block], name)
        return weight

    def put(self, key: str, weight: torch.Tensor) -> None:
        """Put a weight into the model as it is, on the device that it is on."""
        block, name = _split(key)
        module = self.modules[block]
        slots: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        slots[name] = weight

    def carried(self, key: str, attributes: dict[str, Any], patches: Any) -> CarriedOriginal:
        """The entry of a weight that carries its patches, and had these attributes without them."""
        block, name = _split(key)
        return CarriedOriginal(weakref.ref(self.modules[block]), name, attributes, patches)

    def rewrite(self, key: str, tensor: torch.Tensor, *, ours: bool = True) -> None:
        block, name = _split(key)
        self._copied.pop(key, None)
        self.residence.rewrite(block, self.modules[block], name, tensor, ours=ours)

    def restore(self, key: str, reader: FileReader | None = None) -> None:
        """Take all patches out of a weight. Raises HostError if its original is out of reach.

        With a reader, a weight that is in its file is read by way of the compute device, which is the fastest.
        """
        original = self.backup[key]
        if isinstance(original, CarriedOriginal):
            original.restore()
        elif isinstance(original, FileOriginal) and original.file is self.pages.get(key):
            with original.reading() as weight:
                if self.residence.plan is None and not self.residence.is_homed(_split(key)[0]):
                    self.put(key, moved(self.weight(key), weight))
                else:
                    page = self.pages[key]
                    read = None if reader is None or not reader.reads(page) else reader.on_device(page)
                    self.rewrite(key, weight if read is None else read, ours=read is not None)
                    self._copied[key] = _mark(self.weight(key))
        elif isinstance(original, FileOriginal):
            with original.reading() as weight:
                self.rewrite(key, weight, ours=False)
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


def _page_of(weight: torch.Tensor) -> Page | None:
    """The page of a weight that is in its file, which the host's DynamicVRAM loader has mapped; None for all others."""
    if not is_plain(weight) or weight.is_meta or not weight.is_contiguous() or not hasattr(os, "preadv"):
        return None
    found: Any = getattr(weight.untyped_storage(), FILE_SLICE, None)
    if found is None or found.size != weight.nbytes or not isinstance(found.file_ref, int):
        return None
    stamp = file_stamp(found.file_ref)
    return None if stamp is None else Page(weight.detach(), found.file_ref, found.offset, stamp)


def _mark(weight: torch.Tensor) -> tuple[int, int]:
    """What changes when a weight's memory is replaced or written."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _join(block: str, name: str) -> str:
    """The host key of a tensor in a block."""
    return name if block == ROOT else f"{block}.{name}"


def _split(key: str) -> tuple[str, str]:
    """A host key as (block, tensor name)."""
    block, _, name = key.rpartition(".")
    return block or ROOT, name
