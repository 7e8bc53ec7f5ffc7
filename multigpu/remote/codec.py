"""Values as messages and back: a closed set of plain types and tensors. Nothing is pickled, nothing is run.

The header is JSON in ASCII. A list, a text, a whole number, a finite number, true, false and null stand for themselves;
everything else is an object with one name, its kind (`_KINDS`). Bytes and tensors take the buffers in their order. A
header of some length is compressed: no JSON begins as compressed data does.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from ..errors import NotSendable, RemoteError
from .link import Buffer, Message
from .memory import room

MOST_DEPTH = 64
MOST_ITEMS = 1_000_000
MOST_HEADER_BYTES = 64 * 2**20
COMPRESSED = range(1024, 2**20 + 1)
"""Headers of so many bytes are compressed; so none takes more memory than that when it is read."""
MOST_DIMENSIONS = 16
MOST_SIZE = 2**48
"""The largest dimension of a tensor."""
MOST_INTEGER = 2**64
_DIGITS = len(str(MOST_INTEGER)) + 1
_ZLIB = zlib.compress(b"")[:1]

TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
"""The data types of tensors that can be sent, by name."""
_NAMES = {dtype: name for name, dtype in TYPES.items()}

_TUPLE, _DICT, _BYTES, _TENSOR, _DTYPE, _FLOAT = _KINDS = ("tuple", "dict", "bytes", "tensor", "dtype", "float")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def pack(value: Any) -> Message:
    """The value as a message. Its tensors are not copied if they are in RAM and contiguous: send it before they change.

    Raises `NotSendable`, with the type and the path to it, for anything that is not in the closed set.
    """
    buffers: list[Buffer] = []
    plain = _Packing(buffers).plain(value, "", 0)
    header = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(header) > MOST_HEADER_BYTES:
        raise NotSendable(f"a value takes {len(header)} bytes beside its tensors, at most {MOST_HEADER_BYTES} are sent")
    return Message(zlib.compress(header, 1) if len(header) in COMPRESSED else header, buffers)


class _Packing:
    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers
        self._items = 0

    def plain(self, value: Any, path: str, depth: int) -> Any:
        """What stands for the value in the header."""
        self._items += 1
        if depth > MOST_DEPTH or self._items > MOST_ITEMS:
            limit = f"{MOST_DEPTH} levels deep" if depth > MOST_DEPTH else f"{MOST_ITEMS} items"
            raise NotSendable(f"a value is too large to be sent at {path[:200] or 'its top'}: more than {limit}")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int and abs(value) < MOST_INTEGER:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_FLOAT: str(value)}
        if kind in (list, tuple, torch.Size):  # a size arrives as a tuple
            items = [self.plain(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]
            return items if kind is list else {_TUPLE: items}
        if kind is dict:
            return {_DICT: [self._pair(key, item, path, depth) for key, item in value.items()]}
        if kind is bytes:
            self._buffers.append(value)
            return {_BYTES: len(value)}
        if kind is torch.dtype and value in _NAMES:
            return {_DTYPE: _NAMES[value]}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        raise _refused(value, path)

    def _pair(self, key: Any, item: Any, path: str, depth: int) -> list[Any]:
        if type(key) not in (str, int) or (type(key) is int and abs(key) >= MOST_INTEGER):
            raise _refused(key, f"{path}, as a key")
        return [key, self.plain(item, f"{path}[{key!r}]", depth + 1)]

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        name, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if name is None or tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{tensor.layout} on {tensor.device}" if name else str(tensor.dtype)
            raise NotSendable(f"a tensor ({what}) cannot be sent to another machine{_at(path)}")
        if len(shape) > MOST_DIMENSIONS or any(size > MOST_SIZE for size in shape):
            raise NotSendable(f"a tensor of the shape {shape} cannot be sent to another machine{_at(path)}")
        here = tensor.detach().cpu().resolve_conj().resolve_neg()
        order = _order(here)
        self._buffers.append(_bytes_of(here.permute(order).contiguous()))
        return {_TENSOR: [name, shape] if order == sorted(order) else [name, shape, order]}


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, if there are no gaps; else in their own order.

    The order is kept when a tensor is sent: kernels may compute with other roundings in another one.
    """
    order = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return order
    strides = tensor.stride()
    in_memory = sorted(order, key=lambda dimension: -strides[dimension])
    return in_memory if tensor.permute(in_memory).is_contiguous() else order


def _refused(value: Any, path: str) -> NotSendable:
    cls = type(value)
    return NotSendable(f"a {cls.__module__}.{cls.__qualname__} cannot be sent to another machine{_at(path)}")


def _at(path: str) -> str:
    return f" (at {path[:200]})" if path else ""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in RAM, without a copy."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return flat.view(torch.uint8).numpy().data


def unpack(message: Message, *, take_over: bool = False) -> Any:
    """The value of a message. Its tensors are in RAM and have memory of their own.

    That may be the memory of the message, which then must be writable and of no use to anybody else: `take_over`.

    Raises `RemoteError` for anything that `pack` would not have made; takes memory for the message and, if its header
    is compressed, for as many bytes as `COMPRESSED` allows.
    """
    if len(message.header) > MOST_HEADER_BYTES:
        raise _invalid(f"its header has {len(message.header)} bytes, more than {MOST_HEADER_BYTES}")
    try:
        plain = json.loads(_whole(message.header), parse_int=_integer, parse_constant=_constant)
    except (ValueError, RecursionError) as problem:
        raise _invalid(f"its header is not JSON ({problem})") from None
    unpacking = _Unpacking(iter(message.buffers), take_over)
    value = unpacking.value(plain, 0)
    if next(unpacking.buffers, None) is not None:
        raise _invalid("it has more buffers than its header names")
    return value


def _whole(header: bytes) -> bytes:
    """The header as JSON. Raises `RemoteError` unless compressed data is whole, and no longer than it may be."""
    if header[:1] != _ZLIB:
        return header
    expanding = zlib.decompressobj()
    try:
        plain = expanding.decompress(header, COMPRESSED.stop)
    except zlib.error as problem:
        raise _invalid(f"its header cannot be expanded ({problem})") from None
    if len(plain) not in COMPRESSED or not expanding.eof or expanding.unused_data:
        raise _invalid("its header is compressed, but is not whole or has not the length of one that is")
    return plain


class _Unpacking:
    def __init__(self, buffers: Iterator[Buffer], take_over: bool) -> None:
        self.buffers = buffers
        self._take_over = take_over
        self._items = 0

    def value(self, plain: Any, depth: int) -> Any:
        self._items += 1
        if depth > MOST_DEPTH or self._items > MOST_ITEMS:
            raise _invalid(f"it is more than {MOST_DEPTH} levels deep, or has more than {MOST_ITEMS} items")
        if plain is None or isinstance(plain, (bool, int, str)):
            return plain
        if isinstance(plain, float):
            if not math.isfinite(plain):
                raise _invalid("a number is too large")
            return plain
        if isinstance(plain, list):
            return [self.value(item, depth + 1) for item in plain]
        if len(plain) != 1:
            raise _invalid("an object has not one kind")
        ((kind, content),) = plain.items()
        if kind in (_TUPLE, _DICT) and isinstance(content, list):
            if kind == _TUPLE:
                return tuple(self.value(item, depth + 1) for item in content)
            return self._dict(content, depth)
        if kind == _BYTES and type(content) is int:
            return bytes(self._buffer(content))
        if kind == _TENSOR and isinstance(content, list) and len(content) in (2, 3):
            return self._tensor(*content)
        if kind in (_DTYPE, _FLOAT) and isinstance(content, str):
            found = TYPES.get(content) if kind == _DTYPE else _FLOATS.get(content)
            if found is not None:
                return found
        raise _invalid("an object is of no kind that there is")

    def _dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in result:
                raise _invalid("a dict has an entry that is not a new key with a value")
            result[pair[0]] = self.value(pair[1], depth + 1)
        return result

    def _tensor(self, name: Any, shape: Any, order: Any = None) -> torch.Tensor:
        dtype = TYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
            raise _invalid("a tensor has no data type or shape that there is")
        if not all(type(size) is int and 0 <= size <= MOST_SIZE for size in shape):
            raise _invalid("a tensor has a dimension of no possible size")
        order = list(range(len(shape))) if order is None else order
        whole = isinstance(order, list) and all(type(each) is int for each in order)
        if not whole or sorted(order) != list(range(len(shape))):
            raise _invalid("a tensor has no order of dimensions that there is")
        raw = self._buffer(math.prod(shape) * dtype.itemsize)
        in_memory = [shape[each] for each in order]
        if not raw.nbytes:
            try:
                tensor = torch.empty(in_memory, dtype=dtype)
            except RuntimeError:  # larger strides than torch can count
                raise _invalid(f"no tensor has the shape {shape}") from None
        else:
            if not self._take_over:
                raw, given = room(raw.nbytes), raw
                raw[:] = given
            if dtype is torch.bool and numpy.frombuffer(raw, dtype=numpy.uint8).max() > 1:
                raise _invalid("a tensor of truth values has a byte that is neither 0 nor 1")
            tensor = torch.frombuffer(raw, dtype=dtype).reshape(in_memory)
        return tensor.permute([order.index(each) for each in range(len(order))])

    def _buffer(self, size: int) -> memoryview:
        buffer = next(self.buffers, None)
        if buffer is None:
            raise _invalid("it has fewer buffers than its header names")
        view = memoryview(buffer).cast("B")
        if view.nbytes != size:
            raise _invalid(f"a buffer has {view.nbytes} bytes, but its header says {size}")
        return view


def _integer(text: str) -> int:
    number = int(text) if len(text) <= _DIGITS else MOST_INTEGER
    if abs(number) >= MOST_INTEGER:
        raise ValueError("a whole number is too large")
    return number


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _invalid(problem: str) -> RemoteError:
    return RemoteError(f"a message from another machine cannot be read: {problem}")
