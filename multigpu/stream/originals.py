"""The weights as they were before patches, without a second copy of the model in RAM.

The host keeps the original of every patched weight in RAM, in a table that all patchers of a model share (`backup`).
Here an entry only names the place in the model file, if the file holds exactly that tensor (they are compared when the
weight is patched). The entries fit into the host's table (`weight`, `inplace_update`), so that the host's restoring
code works with them. They also name the patches that are in the weight: so the table alone says what is in the weights,
whichever patcher patched or restored them last.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import HostError
from .layout import copy_to, is_plain, of_class
from .pages import Page

_CHECKPOINT_PARTS = ("model.diffusion_model.", "model.", "cond_stage_model.", "first_stage_model.")
_PREFIXES = ("", *_CHECKPOINT_PARTS, "conditioner.embedders.")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Patches = tuple[Any, ...]
"""The host's patches for one weight: (strength, patch, model strength, offset, function) each."""


class TensorFile:
    """A safetensors file that stays open, so that its tensors can be read even after another file took its name."""

    def __init__(self, path: str) -> None:
        self.path = path
        with Path(path).open("rb") as file:
            self._descriptor = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._descriptor)
            self._stamp = self._status()
            length = min(int.from_bytes(file.read(8), "little"), self._stamp[0])
            self._header: dict[str, Any] = json.loads(file.read(length))
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = 8 + length

    def __contains__(self, name: str) -> bool:
        entry = self._header.get(name, {})
        return entry.get("dtype") in _DTYPES and 0 not in entry["shape"]

    @contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor of the file, in the file's own pages, to be copied at once.

        Raises HostError if the file's contents may have changed since it was opened, before or meanwhile.
        """
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        self._check(name)
        with torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the pages cannot be written: nobody does
            count = (end - begin) // dtype.itemsize
            tensor = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=self._data + begin)
        yield tensor.reshape(entry["shape"])
        self._check(name)

    @property
    def changed(self) -> bool:
        """Whether the file's contents may have changed since it was opened."""
        return self._status() != self._stamp

    def _check(self, name: str) -> None:
        if self.changed:
            raise HostError(
                f"{self.path} has changed on disk since it was loaded, so {name} cannot be restored without its LoRA; "
                "choose Unload Models and Execution Cache, then run the workflow again"
            )

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class FileOriginal:
    """A weight that can be read from its file at any time. `patches` are those that the model's weight holds."""

    file: TensorFile | Page
    name: str
    dtype: torch.dtype
    patches: Patches
    inplace_update: bool = False

    @property
    def weight(self) -> torch.Tensor:
        """A copy of its own. Raises HostError if the file has changed."""
        with self.reading() as stored:
            return copy_to(stored, torch.device("cpu"))

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        """The weight, to be copied at once. Raises HostError if the file has changed."""
        with self.file.reading(self.name) as stored, torch.inference_mode(False):
            yield stored if stored.dtype == self.dtype else stored.to(self.dtype)


@dataclass(frozen=True, slots=True)
class KeptOriginal:
    """A weight kept in RAM, because no file holds it as it is. `patches` are those that the model's weight holds."""

    weight: torch.Tensor
    patches: Patches
    inplace_update: bool = False


@dataclass(frozen=True, slots=True)
class CarriedOriginal:
    """A weight whose bytes its patches do not change: a pack's tensor carries them as attributes until it is used.

    `attributes` are those of the tensor without `patches`. It is in the module, under `name`.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    attributes: dict[str, Any]
    patches: Patches
    inplace_update: bool = False

    @property
    def weight(self) -> torch.Tensor:
        """The same bytes with those attributes."""
        present: torch.Tensor = getattr(self.module(), self.name)
        return of_class(type(present), present.as_subclass(torch.Tensor), dict(self.attributes))

    def restore(self) -> None:
        """Take the patches off."""
        attributes = getattr(self.module(), self.name).__dict__
        attributes.clear()
        attributes.update(self.attributes)


Original = FileOriginal | KeptOriginal | CarriedOriginal


class ModelFiles:
    """The safetensors files among those that a model was loaded from."""

    def __init__(self, paths: Iterable[str]) -> None:
        named = [path for path in paths if path.endswith((".safetensors", ".sft"))]
        self._files = [file for path in named if (file := _opened(path)) is not None]

    def original(self, key: str, weight: torch.Tensor, patches: Patches) -> Original:
        """How to get `weight` (the unpatched one of the host's key `key`) back once it holds `patches`."""
        for file, name in self._places(key):
            if _holds(file, name, weight):
                return FileOriginal(file, name, weight.dtype, patches)
        return KeptOriginal(copy_to(weight, torch.device("cpu")), patches)

    def _places(self, key: str) -> Iterator[tuple[TensorFile, str]]:
        """Where a file may hold `key`: with leading parts dropped and the prefixes of checkpoints put before."""
        parts = key.split(".")
        for file in self._files:
            for start in range(len(parts) - 1):
                tail = ".".join(parts[start:])
                for name in (prefix + tail for prefix in _PREFIXES):
                    if name in file:
                        yield file, name


def same_patches(done: Patches, wanted: Any) -> bool:
    """Whether two lists of patches do the same: equal numbers, the very same patch objects."""
    return len(done) == len(wanted) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] and a[3] == b[3] and a[4] is b[4]
        for a, b in zip(done, wanted, strict=True)
    )


def _opened(path: str) -> TensorFile | None:
    """None if what lies there now is no such file: then it holds none of the model's weights."""
    try:
        return TensorFile(path)
    except (OSError, ValueError):
        return None


def _holds(file: TensorFile, name: str, weight: torch.Tensor) -> bool:
    """Whether the file's tensor, cast as a loader would, is `weight` bit for bit."""
    if not is_plain(weight):
        return False
    with file.reading(name) as stored:
        if stored.shape != weight.shape:
            return False
        mine, theirs = weight.detach().contiguous(), stored.to(weight.device).to(weight.dtype).contiguous()
        return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
