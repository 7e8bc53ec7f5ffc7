"""Read the header of a `.gguf` file.

The `gguf` package knows how many bytes each quantised type takes; its reader, however, makes one object per metadata
value (seconds for a text encoder's vocabulary) and trusts the counts in the file. So the header is walked here, over a
read-only map of the file, with each count checked against the bytes that are left before anything is made of it.

What the package refuses is refused here; `tests/unit/cli/test_oracles.py` compares the two. Tensors that overlap or are
not aligned, which only the C reader of the format refuses, are refused as well.
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
from .untrusted import MOST_HEADER_BYTES, open_regular, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MOST_DIMENSIONS = 64
_MOST_BYTES = 2**63 - 1
_MOST_NESTING = 100
_LEAST_TENSOR_BYTES = 24
_LEAST_FIELD_BYTES = 13
_ALIGNMENT_KEY = "general.alignment"
_OWN_KEYS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
"""Names under which the package keeps the start of the file; no field can have one of them."""
_WHOLE_NUMBERS_AND_FLOATS = ("F16", "F32", "F64", "I8", "I16", "I32", "I64")
"""Types that the package reads as they are; all others in rows of whole groups."""

Span = tuple[TensorInfo, int]
"""A tensor and where its bytes start in the data."""


def read_gguf(path: Path) -> list[TensorInfo]:
    """The tensors in the order of the header. Raises `ModelFileError` in one line, `OSError` if reading fails."""
    with open_regular(path) as file:
        start = file.read(24)
        if len(start) < 24 or start[:4] != _MAGIC:
            raise ModelFileError(f"{path} is not a gguf file: it does not start with a gguf header")
        order = "<" if start[4:6] != b"\0\0" else ">"
        (version,) = struct.unpack(f"{order}I", start[4:8])
        if version not in _VERSIONS:
            raise ModelFileError(f"{path} is gguf version {version}; versions 2 and 3 can be read")
        sizes = _type_sizes(path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Walk(data, sizes, order).tensors()
            except ValueError as error:
                raise ModelFileError(f"{path} is not a usable gguf file: {error}; download it again") from None
            except LookupError as error:
                raise ModelFileError(
                    f"{path} cannot be read: {error.args[0]}; update the gguf package: pip install -U gguf"
                ) from None


def _type_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Type number -> (name, elements of one group, bytes of one group), from the `gguf` package."""
    try:
        constants: Any = importlib.import_module("gguf.constants")
    except ImportError:
        raise ModelFileError(f'reading {path} needs the gguf package: pip install "multigpu[gguf]"') from None
    return {int(kind): (kind.name, *constants.GGML_QUANT_SIZES[kind]) for kind in constants.GGML_QUANT_SIZES}


class _Walk:
    """A position in the header; every read is checked against the end of the file.

    Raises `ValueError` for what is wrong, `LookupError` for a type without a size.
    """

    def __init__(self, data: mmap.mmap, sizes: dict[int, tuple[str, int, int]], order: str) -> None:
        self._data, self._sizes, self._at = data, sizes, 8
        self._end = min(len(data), MOST_HEADER_BYTES)
        self._u32, self._u64 = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")

    def tensors(self) -> list[TensorInfo]:
        tensor_count = self._count(_LEAST_TENSOR_BYTES)
        alignment = self._alignment(self._count(_LEAST_FIELD_BYTES))
        spans: dict[str, Span] = {}
        for _ in range(tensor_count):
            tensor, offset = self._span()
            if tensor.name in spans:
                raise ValueError(f"it has two tensors {shown(tensor.name)}")
            if offset % alignment:
                raise ValueError(
                    f"{shown(tensor.name)} starts at byte {offset} of the data, no multiple of {alignment}"
                )
            spans[tensor.name] = (tensor, offset)
        self._check_room(spans, -(-self._at // alignment) * alignment)
        return [tensor for tensor, _ in spans.values()]

    def _alignment(self, field_count: int) -> int:
        """Go through the metadata; all that is wanted of it is what the tensors are aligned to."""
        alignment = 32
        keys = set(_OWN_KEYS)
        for _ in range(field_count):
            key, kind = self._text(), self._number(self._u32)
            if key in keys:
                raise ValueError(f"it has two metadata fields {shown(key)}")
            keys.add(key)
            if key != _ALIGNMENT_KEY:
                self._skip_value(kind, 0)
                continue
            alignment = self._number(self._u32) if kind == _UINT32 else 0
            if alignment == 0 or alignment & (alignment - 1):
                raise ValueError(f"its {_ALIGNMENT_KEY} is not a power of two, as a number of 32 bits")
        return alignment

    def _span(self) -> Span:
        name, dimensions = self._text(), self._number(self._u32)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number(self._u64) for _ in range(dimensions))[::-1]
        kind, offset = self._number(self._u32), self._number(self._u64)
        if kind not in self._sizes:
            raise LookupError(f"{shown(name)} has the unknown type {kind}")
        dtype, group, group_bytes = self._sizes[kind]
        if dtype not in _WHOLE_NUMBERS_AND_FLOATS and (not shape or shape[-1] % group):
            row = shape[-1] if shape else 1
            raise ValueError(f"{shown(name)} is {dtype}, in groups of {group}, and its rows have {row} elements")
        if math.prod(filter(None, shape)) // group * group_bytes > _MOST_BYTES:
            raise ValueError(f"{shown(name)} has the impossible shape {shown(shape)}")
        return TensorInfo(name, dtype, shape, math.prod(shape) // group * group_bytes), offset

    def _check_room(self, spans: dict[str, Span], data_at: int) -> None:
        """The tensors lie in the file, and none over another."""
        last_end, last = 0, ""
        for tensor, start in sorted(spans.values(), key=lambda span: span[1]):
            if not tensor.bytes:
                continue
            if start < last_end:
                raise ValueError(f"{shown(tensor.name)} overlaps {shown(last)}")
            last_end, last = start + tensor.bytes, tensor.name
            if data_at + last_end > len(self._data):
                raise ValueError(
                    f"it is cut short, since {shown(last)} ends at byte {data_at + last_end} of {len(self._data)}"
                )

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._advance(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self._advance(self._number(self._u64))
        elif kind == _ARRAY and depth < _MOST_NESTING:
            inner = self._number(self._u32)
            count = self._count(_SCALAR_BYTES.get(inner, 8))
            if inner in _SCALAR_BYTES:
                self._advance(count * _SCALAR_BYTES[inner])
                return
            for _ in range(count):
                self._skip_value(inner, depth + 1)
        else:
            raise ValueError(f"it has a metadata value of type {kind}, {depth} arrays deep")

    def _count(self, least_bytes: int) -> int:
        """A number of things that each take at least so many bytes of the rest of the header."""
        count = self._number(self._u64)
        if count * least_bytes > self._end - self._at:
            raise ValueError(f"it claims {count} entries, more than it has bytes for")
        return count

    def _text(self) -> str:
        length = self._number(self._u64)
        start = self._at
        self._advance(length)
        return self._data[start : self._at].decode("utf-8")

    def _number(self, form: struct.Struct) -> int:
        start = self._at
        self._advance(form.size)
        (value,) = form.unpack_from(self._data, start)
        return int(value)

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._end:
            raise ValueError(
                f"its header is longer than the {self._end} bytes that "
                + ("it has" if self._end == len(self._data) else "a header may have")
            )
