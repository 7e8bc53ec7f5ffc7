"""Weights whose bytes are pages of their model file, mapped into memory by the host.

Such a weight costs no RAM of its own: the system reads its pages when they are used, and drops them when RAM is short.
As long as the file is as it was, the original of the weight is known without comparing anything, and the weight can
rest in these pages while its model is not loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import HostError

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A weight in the pages of its file: must not be written.

    `descriptor` is the open file, and `offset` is where the weight's bytes begin in it.
    """

    tensor: torch.Tensor
    descriptor: int
    offset: int
    stamp: Stamp

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

    def read_into(self, memory: memoryview, begin: int = 0) -> None:
        """Fill `memory` with the weight's bytes from `begin` on. Reads the file, which is faster than its pages."""
        done = 0
        while done < len(memory):
            count = os.preadv(self.descriptor, [memory[done:]], self.offset + begin + done)
            if not count:
                raise OSError("the model file has become shorter since it was loaded")
            done += count

    def check(self, name: str) -> None:
        """Raises HostError if the file has changed."""
        if self.changed:
            raise HostError(
                f"the model file has changed on disk since it was loaded, so {name} cannot be read from it; choose "
                "Unload Models and Execution Cache, then run the workflow again"
            )


def file_stamp(descriptor: int) -> Stamp | None:
    """Size and time of change of an open file; None if that cannot be told."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
