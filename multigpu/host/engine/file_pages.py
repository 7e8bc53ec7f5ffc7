"""The weights of one model that were pages of its file when it was read: which of them still have those bytes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...devices.torch_devices import device_of
from ...stream.homes import moved
from ...stream.layout import is_plain, leaves_of, stored_bytes
from ...stream.originals import FileOriginal
from ...stream.pages import Page, PagedLeaf, file_stamp
from .blocks import join, late_dtype, split, wanted_dtype

FILE_SLICE = "_comfy_tensor_file_slice"
"""An attribute that the host's DynamicVRAM loader gives the storage of a weight that it has mapped from a file: the
open file, a lock, where the weight's bytes begin, how many they are."""


Mark = tuple[tuple[int, int], ...]
"""Of each leaf of a weight, where its memory is and how often it was written."""


class FilePages:
    """By host key. A weight has the bytes of its page if it is there, or was copied from there and is unchanged."""

    def __init__(self, modules: MutableMapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._pages: dict[str, Page] = {}
        self._copies: dict[str, Mark] = {}
        self._expected: set[str] = set()

    def note(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Remember which weights are in the pages of their file now, just after the model was read."""
        for block, module in modules.items():
            self._modules.setdefault(block, module)  # those of a loaded model are known, without its object patches
            for name, weight in module._parameters.items():
                page = None if weight is None or self.holding(block, name) else _page_of(weight)
                if page is not None:
                    self._pages[join(block, name)] = page

    def __iter__(self) -> Iterator[str]:
        return iter(self._pages)

    def blocks(self, backup: Mapping[str, Any]) -> set[str]:
        """The blocks all of whose weights can rest in their pages, with the patches that `backup` knows taken out."""
        return {
            block
            for block, module in self._modules.items()
            if (names := _weights(module)) and all(self._can_rest(join(block, name), backup) for name in names)
        }

    def homes(self, backup: Mapping[str, Any]) -> set[str]:
        """Those of these blocks whose home their pages can be: next to nothing of them is elsewhere."""
        return {
            block
            for block in self.blocks(backup)
            if all(_is_all_there(self._pages[join(block, name)]) for name in _weights(self._modules[block]))
        }

    def _can_rest(self, key: str, backup: Mapping[str, Any]) -> bool:
        original = backup.get(key)
        if original is None:
            return self._has_its_bytes(key)
        return isinstance(original, FileOriginal) and (page := self.of(key, original)) is not None and not page.changed

    def original(self, key: str, patches: Any) -> FileOriginal | None:
        """The original of a weight that has the bytes of its page; None for others."""
        page = self._pages.get(key)
        return FileOriginal(page, key, page.tensor.dtype, patches) if page and self._has_its_bytes(key) else None

    def of(self, key: str, original: FileOriginal) -> Page | None:
        """The page that an original is; None for one that is elsewhere in a file."""
        page = self._pages.get(key)
        return page if page is original.file else None

    def holding(self, block: str, name: str) -> Page | None:
        """The page that a weight is in now; None for one that is elsewhere."""
        page, weight = self._pages.get(join(block, name)), self._weight(join(block, name))
        return page if page is not None and weight is not None and page.holds(weight) else None

    def rest(self, block: str, name: str) -> bool:
        """Let a weight rest in its page again. False if that is not possible: it has none, or other bytes."""
        key = join(block, name)
        if not self._has_its_bytes(key):
            return False
        slots = self._modules[block]._parameters
        slots[name] = moved(slots[name], self._pages[key].tensor)  # type: ignore[arg-type,assignment]
        return True

    def rest_all(self, device: torch.device, without: Container[str]) -> None:
        """Let all weights that are on `device` rest in their pages again, so that nothing has to be copied."""
        for key in self._pages:
            weight = self._weight(key)
            if weight is not None and weight.device == device and key not in without:
                self.rest(*split(key))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While weights are moved: those with the bytes of their pages have them afterwards.

        Raises HostError, before anything is moved, if a weight is in a file that has changed since it was loaded, and
        afterwards if one of the files has changed meanwhile.
        """
        known = [key for key in self._pages if self._has_its_bytes(key)]
        inside = [key for key in self._pages if self.holding(*split(key)) is not None]
        for key in inside:
            self._pages[key].check(key)
        yield
        for key in inside:
            self._pages[key].check(key)
        for key in known:
            self.copied(key)

    def copied(self, key: str) -> None:
        """The present weight was copied from its page."""
        weight = self._weight(key)
        if weight is not None:
            self._copies[key] = _mark(weight)

    @contextmanager
    def moving_with(self, block: str) -> Iterator[None]:
        """While a block is moved: its weights that have the bytes of their pages have them afterwards."""
        keys = (join(block, name) for name in _weights(self._modules[block]))
        known = [key for key in keys if self._has_its_bytes(key)]
        yield
        for key in known:
            self.copied(key)

    def expect(self) -> None:
        """Weights that are in their pages now will be copied from there."""
        self._expected = {key for key in self._pages if self.holding(*split(key)) is not None}

    def came(self, block: str) -> None:
        """The weights of a block that are expected were copied from their pages."""
        for name in _weights(self._modules[block]):
            if join(block, name) in self._expected:
                self.copied(join(block, name))

    def cast(self, block: str, compute: torch.device) -> None:
        """Cast the weights of a block that have come to stay on the compute device to the type in which they are used.

        Those elsewhere keep the type that they have in the file: the host's own code casts them at each use.
        """
        slots = self._modules[block]._parameters
        for name in _weights(self._modules[block]):
            weight: Any = slots[name]
            wanted = late_dtype(self._modules[block], name, weight) if device_of(weight) == compute else None
            if wanted is not None and not in_file(weight):
                with torch.inference_mode(False), torch.no_grad():
                    cast = weight.detach().view(wanted)  # in the same memory: what has filled it may still be queued
                    cast.copy_(weight.detach().to(wanted))
                    slots[name] = moved(weight, cast)  # type: ignore[assignment]

    def written(self, key: str) -> None:
        """The present weight gets other contents."""
        self._copies.pop(key, None)

    def _has_its_bytes(self, key: str) -> bool:
        page, weight = self._pages.get(key), self._weight(key)
        if page is None or weight is None or page.changed:
            return False
        return page.holds(weight) or self._copies.get(key) == _mark(weight)

    def _weight(self, key: str) -> torch.Tensor | None:
        """None if other code has taken the weight, or its module, out of the model."""
        block, name = split(key)
        module = self._modules.get(block)
        return None if module is None else module._parameters.get(name)


def blocks_in_pages(modules: Mapping[str, torch.nn.Module]) -> set[str]:
    """The blocks whose home the pages of a model file can be: their weights are there, in a type that needs no other
    memory for its use.
    """
    return {
        block
        for block, module in modules.items()
        if (names := _weights(module)) and all(_is_used_as_stored(module, name) for name in names)
    }


def paged_leaves(modules: Mapping[str, torch.nn.Module]) -> list[PagedLeaf]:
    """What is in pages of a model file now."""
    weights = (weight for module in modules.values() for weight in module._parameters.values() if weight is not None)
    pages = (_page_of(weight) for weight in weights)
    return [leaf for page in pages if page is not None for leaf in page.leaves.values()]


def in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pages of a model file."""
    return all(hasattr(leaf.untyped_storage(), FILE_SLICE) for leaf in leaves_of(tensor)[0])


def _weights(module: torch.nn.Module) -> list[str]:
    return [name for name, weight in module._parameters.items() if weight is not None]


def _is_used_as_stored(module: torch.nn.Module, name: str) -> bool:
    weight: Any = module._parameters[name]
    page, same = _page_of(weight), wanted_dtype(module, name, weight) == weight.dtype
    return page is not None and _is_all_there(page) and (same or late_dtype(module, name, weight) is not None)


def _is_all_there(page: Page) -> bool:
    return page.outside <= stored_bytes(page.tensor) // 100


def _mark(weight: torch.Tensor) -> Mark:
    """What changes when a weight's memory is replaced or written."""
    return tuple((leaf.data_ptr(), 0 if leaf.is_inference() else leaf._version) for leaf in leaves_of(weight)[0])


def _page_of(weight: torch.Tensor) -> Page | None:
    if weight.is_meta or not (is_plain(weight) or is_traceable_wrapper_subclass(weight)):
        return None
    leaves, rebuild = leaves_of(weight)
    paged = {number: found for number, leaf in enumerate(leaves) if (found := _paged(leaf)) is not None}
    stamp = file_stamp(paged[0].descriptor) if 0 in paged else None
    return None if stamp is None else Page(rebuild(leaves), paged, stamp)


def _paged(leaf: torch.Tensor) -> PagedLeaf | None:
    found: Any = getattr(leaf.untyped_storage(), FILE_SLICE, None)
    if found is None or found.size != leaf.nbytes or not leaf.is_contiguous() or not isinstance(found.file_ref, int):
        return None
    return PagedLeaf(leaf, found.file_ref, found.offset)
