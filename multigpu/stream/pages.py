"""Weights whose bytes are pages of their model file, mapped into memory by the host.

Such a weight costs no RAM of its own: the system reads its pages when they are used, and drops them when RAM is short.
As long as the file is as it was, the original of the weight is known without comparing anything, and the weight can
rest in these pages while its model is not loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import HostError
from .layout import leaves_of, stored_bytes

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class PagedLeaf:
    """A plain tensor in the pages of a file. `descriptor` is the open file, `offset` is where its bytes begin in it."""

    tensor: torch.Tensor
    descriptor: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def flat(self) -> torch.Tensor:
        return self.tensor.view(-1).view(torch.uint8)

    def read_into(self, memory: memoryview, begin: int = 0) -> None:
        """Fill `memory` with its bytes from `begin` on. Reads the file, where the system can: faster than its pages."""
        if not hasattr(os, "preadv"):
            torch.frombuffer(memory, dtype=torch.uint8).copy_(self.flat[begin : begin + len(memory)])
            return
        done = 0
        while done < len(memory):
            count = os.preadv(self.descriptor, [memory[done:]], self.offset + begin + done)
            if not count:
                raise OSError("the model file has become shorter since it was loaded")
            done += count


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A weight in the pages of its file: must not be written.

    Of one that is quantised not all `leaves`, by number, are there: the host's loader copies its scales to RAM.
    """

    tensor: torch.Tensor
    leaves: Mapping[int, PagedLeaf]
    stamp: Stamp

    @property
    def descriptor(self) -> int:
        return next(iter(self.leaves.values())).descriptor

    @property
    def outside(self) -> int:
        """Bytes of the weight that are not in these pages."""
        return stored_bytes(self.tensor) - sum(leaf.nbytes for leaf in self.leaves.values())

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether a weight is in these pages."""
        found, _ = leaves_of(weight)
        return all(found[number].data_ptr() == leaf.tensor.data_ptr() for number, leaf in self.leaves.items())

    @property
    def changed(self) -> bool:
        """Whether the file's contents may have changed since it was loaded."""
        return file_stamp(self.descriptor) != self.stamp

    @contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor, to be copied at once. Raises HostError if the file has changed, before or meanwhile."""
        self.check(name)
        yield self.tensor
        self.check(name)

    def check(self, name: str) -> None:
        """Raises HostError if the file has changed."""
        if self.changed:
            raise HostError(
                f"the model file has changed on disk since it was loaded, so {name} cannot be read from it; choose "
                "Unload Models and Execution Cache, then run the workflow again"
            )


def file_stamp(descriptor: int) -> Stamp | None:
    """Size and time of change of an open file; None if that cannot be told."""
    if sys.platform == "win32":
        return _windows_stamp(descriptor)
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _windows_stamp(handle: int) -> Stamp | None:
    """The same on Windows, where the host's loader has a handle of the system's, and no descriptor of Python's."""
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    size, written = ctypes.c_int64(), ctypes.c_int64()
    its = ctypes.c_void_p(handle)
    if not kernel.GetFileSizeEx(its, ctypes.byref(size)):
        return None
    return (size.value, written.value) if kernel.GetFileTime(its, None, None, ctypes.byref(written)) else None
