"""One tensor as a file's header describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor. `bytes` is what it takes in the file; `dtype` is the file format's own name of the type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)
