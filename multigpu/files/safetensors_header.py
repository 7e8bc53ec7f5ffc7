"""Read the header of a `.safetensors` file: eight bytes of length, then JSON. Nothing else of the file is read.

What the `safetensors` library refuses is refused here; `tests/unit/cli/test_oracles.py` compares the two. Stricter than
the library in what no writer of such files does: a name that stands in the header twice, and entries that are not plain
objects.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .tensors import TensorInfo
from .untrusted import MOST_HEADER_BYTES, open_regular, parse_json, product, shown

_BITS = {
    **{name: 64 for name in ("F64", "I64", "U64", "C64")},
    **{name: 32 for name in ("F32", "I32", "U32")},
    **{name: 16 for name in ("F16", "BF16", "I16", "U16")},
    **{name: 8 for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL")},
    **{name: 6 for name in ("F6_E2M3", "F6_E3M2")},
    "F4": 4,
}
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")


def read_safetensors(path: Path) -> list[TensorInfo]:
    """The tensors in the order of the header. Raises `ModelFileError` in one line, `OSError` if reading fails."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ModelFileError(
                f"{path} is not a safetensors file: it has {size} bytes and claims a header of {length}; "
                "download it again or choose another file"
            )
        text = file.read(length)
    try:
        spans = _entries(parse_json(text))
        _check_cover(spans, size - 8 - length)
    except ValueError as error:
        raise ModelFileError(f"{path} is not a usable safetensors file: {error}; download it again") from None
    except LookupError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.args[0]}; update MultiGPU, or choose another file"
        ) from None
    return [tensor for tensor, _ in spans]


Span = tuple[TensorInfo, int]
"""A tensor and where its bytes start in the data."""


def _entries(header: Any) -> list[Span]:
    """Raises `ValueError` for what is wrong, as all functions below, and `LookupError` for a dtype without a size."""
    if not isinstance(header, tuple):
        raise ValueError("its header is not a JSON object")
    entries = dict(header)
    if len(entries) < len(header):
        counts = Counter(name for name, _ in header)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"its header has two entries for {shown(twice)}")
    _check_metadata(entries.pop(_METADATA, None))
    return [_span(name, entry) for name, entry in entries.items()]


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, tuple) and all(isinstance(value, str) for _, value in metadata)
    ):
        raise ValueError(f"its {_METADATA} is not a JSON object with texts")
    for key, value in metadata or ():
        _check_text(key + value)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"half of a surrogate pair stands in {shown(text)}") from None


def _span(name: str, entry: Any) -> Span:
    _check_text(name)
    fields = dict(entry) if isinstance(entry, tuple) else {}
    if len(fields) < len(_FIELDS) or [sum(key == field for key, _ in entry) for field in _FIELDS] != [1, 1, 1]:
        raise ValueError(f"the header's entry for {shown(name)} does not have dtype, shape and data_offsets, each once")
    dtype, shape, offsets = (fields.pop(field) for field in _FIELDS)
    if any(isinstance(value, (list, tuple)) for value in fields.values()):
        raise ValueError(f"the header's entry for {shown(name)} has more than dtype, shape and data_offsets")
    _check_text("".join(value for value in (*fields, *fields.values()) if isinstance(value, str)))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise LookupError(f"{shown(name)} has the unknown dtype {shown(dtype)}")
    if not _are_numbers(shape) or not _are_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"the header's entry for {shown(name)} has a wrong shape or wrong data_offsets, which are lists of whole "
            "numbers below 2^64, the second one of a start and an end"
        )
    elements, size = product(shape), offsets[1] - offsets[0]
    if elements is None or elements * _BITS[dtype] != 8 * size:
        raise ValueError(f"{shown(name)} is {dtype} of shape {shown(shape)}, which does not fit its {size} bytes")
    return TensorInfo(name, dtype, tuple(shape), size), offsets[0]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _check_cover(spans: Iterable[Span], data_bytes: int) -> None:
    """The tensors lie one behind the other in the data and fill it, in whatever order the header has them."""
    at = 0
    for tensor, start in sorted(spans, key=lambda span: (span[1], span[1] + span[0].bytes)):
        if start != at:
            where = "overlaps another tensor" if start < at else f"leaves a gap of {start - at} bytes before it"
            raise ValueError(f"{shown(tensor.name)} starts at byte {start} of the data, which {where}")
        at += tensor.bytes
        if at > data_bytes:
            raise ValueError(f"it is cut short, since {shown(tensor.name)} ends at byte {at} of {data_bytes}")
    if at < data_bytes:
        raise ValueError(f"{data_bytes - at} bytes at its end belong to no tensor")
