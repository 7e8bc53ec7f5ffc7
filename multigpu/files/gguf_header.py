"""Read the header of a `.gguf` file.

The `gguf` package knows how many bytes each quantised type takes; its reader, however, makes one object per metadata
value (seconds for a text encoder's vocabulary) and trusts the counts in the file. So the header is walked here, over a
read-only map of the file, with each count checked against the bytes that are left before anything is made of it.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .tensors import TensorInfo

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 8
_MOST_NESTING = 4
_LEAST_TENSOR_BYTES = 24
_LEAST_FIELD_BYTES = 13
_ALIGNMENT_KEY = b"general.alignment"


def read_gguf(path: Path) -> list[TensorInfo]:
    """The tensors in the order of the header. Raises `ModelFileError` in one line, `OSError` if it cannot be opened."""
    with path.open("rb") as file:
        start = file.read(24)
        version = int.from_bytes(start[4:8], "little")
        if len(start) < 24 or start[:4] != _MAGIC:
            raise ModelFileError(f"{path} is not a gguf file: it does not start with a gguf header")
        if version not in _VERSIONS:
            raise ModelFileError(f"{path} is gguf version {version}; versions 2 and 3 (little-endian) can be read")
        sizes = _type_sizes(path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data, sizes).tensors()


def _type_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Type number -> (name, elements of one group, bytes of one group), from the `gguf` package."""
    try:
        constants: Any = importlib.import_module("gguf.constants")
    except ImportError:
        raise ModelFileError(f'reading {path} needs the gguf package: pip install "multigpu[gguf]"') from None
    return {int(kind): (kind.name, *constants.GGML_QUANT_SIZES[kind]) for kind in constants.GGML_QUANT_SIZES}


class _Walk:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, sizes: dict[int, tuple[str, int, int]]) -> None:
        self._path, self._data, self._sizes, self._at = path, data, sizes, 8

    def tensors(self) -> list[TensorInfo]:
        tensor_count = self._count(_LEAST_TENSOR_BYTES)
        field_count = self._count(_LEAST_FIELD_BYTES)
        alignment = 32
        for _ in range(field_count):
            key = self._string()
            kind = self._number("<I")
            if key == _ALIGNMENT_KEY and kind == 4:
                alignment = self._number("<I")
            else:
                self._skip_value(kind, 0)
        if alignment == 0:
            raise self._wrong("an alignment of 0")
        entries = [self._entry() for _ in range(tensor_count)]
        data_at = -(-self._at // alignment) * alignment
        for tensor, offset in entries:
            if data_at + offset + tensor.bytes > len(self._data):
                raise ModelFileError(
                    f"{self._path} is cut short: {tensor.name!r} ends at byte {data_at + offset + tensor.bytes} of "
                    f"{len(self._data)}; download it again"
                )
        return [tensor for tensor, _ in entries]

    def _entry(self) -> tuple[TensorInfo, int]:
        """One tensor and its offset in the data."""
        name = self._string().decode("utf-8", "replace")
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"{dimensions} dimensions for {name!r}")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._sizes:
            raise ModelFileError(
                f"{self._path}: {name!r} has the unknown type {kind}; update the gguf package: pip install -U gguf"
            )
        dtype, group, group_bytes = self._sizes[kind]
        return TensorInfo(name, dtype, shape, math.prod(shape) // group * group_bytes), offset

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._advance(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self._advance(self._number("<Q"))
        elif kind == _ARRAY and depth < _MOST_NESTING:
            inner = self._number("<I")
            count = self._count(_SCALAR_BYTES.get(inner, 8))
            if inner in _SCALAR_BYTES:
                self._advance(count * _SCALAR_BYTES[inner])
                return
            for _ in range(count):
                self._skip_value(inner, depth + 1)
        else:
            raise self._wrong(f"a metadata value of type {kind}")

    def _count(self, least_bytes: int) -> int:
        """A number of things that each take at least so many bytes of the rest of the file."""
        count = self._number("<Q")
        if count * least_bytes > len(self._data) - self._at:
            raise self._wrong(f"{count} entries, more than the file has bytes for")
        return count

    def _string(self) -> bytes:
        length = self._number("<Q")
        start = self._at
        self._advance(length)
        return self._data[start : self._at]

    def _number(self, form: str) -> int:
        start = self._at
        self._advance(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self._data, start)
        return int(value)

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise self._wrong("a header that ends beyond the file")

    def _wrong(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a usable gguf file: it has {what}; download it again")
