"""Memory for bytes that arrive."""

from __future__ import annotations

import numpy

ALIGNMENT = 64
"""As torch aligns its tensors: kernels may compute with other roundings from other addresses."""


def room(size: int) -> memoryview:
    """Bytes that are not initialised. Large ones lie in huge pages where the system has them, as numpy asks for these.

    They are then filled for the first time in half the time, or less.
    """
    whole = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + size].data
