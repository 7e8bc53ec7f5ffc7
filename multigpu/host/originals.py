"""The weights as they were before patches, without a second copy of the model in RAM.

The host keeps the original of every patched weight in RAM. Here an original is kept as its place in the model file
whenever the file holds exactly that tensor: that is compared, not guessed, when the weight is patched. The objects fit
into the host's own `backup` table (`weight`, `inplace_update`), so that the host's restoring code works with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import HostError
from ..stream.layout import copy_to

_PREFIXES = (
    "",
    "model.diffusion_model.",
    "model.",
    "cond_stage_model.",
    "first_stage_model.",
    "conditioner.embedders.",
)


@dataclass(frozen=True, slots=True)
class FileOriginal:
    """A weight that can be read from `path` at any time."""

    path: str
    stamp: tuple[int, int]
    name: str
    dtype: torch.dtype
    inplace_update: bool = False

    @property
    def readable(self) -> bool:
        return _stamp(self.path) == self.stamp

    @property
    def complaint(self) -> str:
        return (
            f"{self.path} has changed on disk since it was loaded, so {self.name} cannot be restored without its LoRA; "
            "choose Unload Models and Execution Cache, then run the workflow again"
        )

    @property
    def weight(self) -> torch.Tensor:
        if not self.readable:
            raise HostError(self.complaint)
        return _read(self.path, self.name).to(self.dtype)


@dataclass(frozen=True, slots=True)
class KeptOriginal:
    """A weight kept in RAM, because no file holds it as it is."""

    weight: torch.Tensor
    inplace_update: bool = False


Original = FileOriginal | KeptOriginal


class ModelFiles:
    """The safetensors files a patcher was loaded from, as far as its loader told."""

    def __init__(self, patcher: Any) -> None:
        init = getattr(patcher, "cached_patcher_init", None)
        self._names = {path: _names(path) for path in _paths(init[1])} if init else {}

    def original(self, key: str, weight: torch.Tensor) -> Original:
        """How to get `weight` (the unpatched one of the host's key `key`) back later."""
        for path, name in self._places(key):
            if _holds(path, name, weight):
                return FileOriginal(path, _stamp(path), name, weight.dtype)
        return KeptOriginal(copy_to(weight, torch.device("cpu")))

    def _places(self, key: str) -> Iterator[tuple[str, str]]:
        """Where the file may hold `key`: with leading parts dropped and the prefixes of checkpoints put before."""
        parts = key.split(".")
        for path, names in self._names.items():
            for start in range(len(parts) - 1):
                tail = ".".join(parts[start:])
                for name in (prefix + tail for prefix in _PREFIXES):
                    if name in names:
                        yield path, name


def _paths(arguments: Any) -> Iterator[str]:
    if isinstance(arguments, str):
        if arguments.endswith((".safetensors", ".sft")) and os.path.isfile(arguments):
            yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _paths(argument)


def _stamp(path: str) -> tuple[int, int]:
    """What tells one version of a file from another; a file that is gone is unlike any."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _names(path: str) -> frozenset[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return frozenset(file.keys())


def _read(path: str, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _holds(path: str, name: str, weight: torch.Tensor) -> bool:
    """Whether the file's tensor, cast as a loader would, is `weight` bit for bit."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return False
    stored = _read(path, name)
    if stored.shape != weight.shape:
        return False
    mine, theirs = weight.detach().cpu().contiguous(), stored.to(weight.dtype).contiguous()
    return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
