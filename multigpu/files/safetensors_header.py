"""Read the header of a `.safetensors` file: eight bytes of length, then JSON. Nothing else of the file is read.

The length is checked against the file before anything is allocated, and the offsets against the file's size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .tensors import TensorInfo

MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_BITS = {
    **{name: 64 for name in ("F64", "I64", "U64", "C64")},
    **{name: 32 for name in ("F32", "I32", "U32")},
    **{name: 16 for name in ("F16", "BF16", "I16", "U16")},
    **{name: 8 for name in ("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")},
}


def read_safetensors(path: Path) -> list[TensorInfo]:
    """The tensors in the order of the header. Raises `ModelFileError` in one line, `OSError` if it cannot be opened."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ModelFileError(
                f"{path} is not a safetensors file: it has {size} bytes and claims a header of {length}; "
                "download it again or choose another file"
            )
        text = file.read(length)
    entries = _parse(path, text)
    entries.pop("__metadata__", None)
    return [_tensor(path, name, entry, size - 8 - length) for name, entry in entries.items()]


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ModelFileError(
            f"{path} is not a safetensors file: its header is a {type(entries).__name__}, not an object"
        )
    return entries


def _tensor(path: Path, name: str, entry: Any, data_bytes: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(f"{path}: the header's entry for {name!r} lacks dtype, shape or data_offsets") from None
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers) or begin > end:
        raise ModelFileError(f"{path}: the header's entry for {name!r} has a wrong dtype, shape or data_offsets")
    if end > data_bytes:
        raise ModelFileError(
            f"{path} is cut short: {name!r} ends at byte {end} of {data_bytes} bytes of data; download it again"
        )
    tensor = TensorInfo(name, dtype, tuple(shape), end - begin)
    if dtype in _BITS and tensor.elements * _BITS[dtype] // 8 != tensor.bytes:
        raise ModelFileError(f"{path}: {name!r} is {dtype} of shape {shape} but has {tensor.bytes} bytes")
    return tensor
