"""What is sent comes back equal; what cannot be sent, or was never sent, is refused."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
import uuid
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu.errors import NotSendable, RemoteError
from multigpu.remote import codec, frames
from multigpu.remote.codec import TYPES, pack, unpack
from multigpu.remote.link import Message
from multigpu.remote.memory import ALIGNMENT


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure and bits; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype is other.dtype and one.shape == other.shape
        return alike and bytes(codec._bytes_of(one.contiguous())) == bytes(codec._bytes_of(other.contiguous()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from([*TYPES.values()]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**64) + 1, 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9)
    | tensors() | st.sampled_from([*TYPES.values()])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(VALUES)
def test_what_is_sent_comes_back(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@settings(max_examples=300)
@given(VALUES, st.data())
def test_a_changed_message_is_refused_or_a_value(value: Any, data: st.DataObject) -> None:
    """Headers and buffers with bytes changed, cut or added: never another exception, never more memory."""
    message = pack([value, "longer" * 200] if data.draw(st.booleans()) else value)
    header = bytearray(message.header)
    if data.draw(st.booleans()):  # change what is compressed, or what was made of it
        header = bytearray(codec._whole(bytes(header)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(header)))
        header[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"[", b"]", b"{", b'"', b"9", b"1e999", b"-", b"tensor", b"NaN"])
        )
    if data.draw(st.booleans()):
        header = bytearray(zlib.compress(header))
    buffers = [bytes(buffer) for buffer in message.buffers]
    if buffers and data.draw(st.booleans()):
        buffers.pop(data.draw(st.integers(0, len(buffers) - 1)))
    try:
        result = unpack(Message(bytes(header), buffers))
    except RemoteError:
        return
    assert same(unpack(pack(result)), result)


NOISE = st.binary(max_size=60) | st.binary(max_size=60).map(lambda end: zlib.compress(b"1")[:2] + end)


@settings(max_examples=200)
@given(NOISE, st.lists(st.binary(max_size=9), max_size=2))
def test_noise_is_refused_or_a_value(header: bytes, buffers: list[bytes]) -> None:
    try:
        unpack(Message(header, buffers))
    except RemoteError as refused:
        assert "cannot be read" in str(refused)


LIES = {
    "a size that is not there": ('{"tensor":["float32",[1000000,1000000]]}', [b"1234"]),
    "less than is there": ('{"tensor":["float32",[1]]}', [b"12345678"]),
    "an unknown data type": ('{"tensor":["qint8",[4]]}', [b"1234"]),
    "a negative dimension": ('{"tensor":["uint8",[-4,-1]]}', [b"1234"]),
    "a true dimension": ('{"tensor":["uint8",[true]]}', [b"1"]),
    "too many dimensions": ('{"tensor":["uint8",[' + ",".join("1" * 17) + "]]}", [b"1"]),
    "strides that overflow": ('{"tensor":["uint8",[0' + 6 * ",281474976710656" + "]]}", [b""]),
    "an order of other dimensions": ('{"tensor":["uint8",[2,2],[0,2]]}', [b"1234"]),
    "an order that is none": ('{"tensor":["uint8",[2,2],[0,null]]}', [b"1234"]),
    "a bool of 2": ('{"tensor":["bool",[1]]}', [b"\x02"]),
    "one buffer used twice": ('[{"bytes":1},{"bytes":1}]', [b"1"]),
    "a buffer that nobody names": ("1", [b"1"]),
    "two kinds": ('{"bytes":1,"tuple":[]}', [b"1"]),
    "no kind": ("{}", []),
    "another kind": ('{"object":"os.system"}', []),
    "a key twice": ('{"dict":[["a",1],["a",2]]}', []),
    "a key that is no key": ('{"dict":[[null,1]]}', []),
    "too deep": ("[" * 100 + "]" * 100, []),
    "far too deep": ("[" * 100_000, []),
    "a number without end": ("1" * 100_000, []),
    "an infinite number": ("1e999", []),
    "NaN": ("NaN", []),
    "an unknown float": ('{"float":"many"}', []),
    "not ASCII": ("\xff", []),
    "compressed, but short": (zlib.compress(b"[]").decode("latin-1"), []),
    "compressed, but cut": (zlib.compress(json.dumps([*range(2000)]).encode())[:-1].decode("latin-1"), []),
    "compressed, and then more": ((zlib.compress(json.dumps([*range(2000)]).encode()) + b"1").decode("latin-1"), []),
    "compressed twice": (zlib.compress(zlib.compress(b"1" * 2000).ljust(2000)).decode("latin-1"), []),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str) -> None:
    header, buffers = LIES[lie]
    with pytest.raises(RemoteError, match="cannot be read"):
        unpack(Message(header.encode("latin-1"), buffers))


class Text(str):
    """A text with behaviour of its own."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"options": {"wrappers": [len]}}, "builtin_function_or_method .*at \\['options'\\]\\['wrappers'\\]\\[0\\]"),
        ([object()], "builtins.object .*at \\[0\\]"),
        (uuid.UUID(int=1), "uuid.UUID"),
        (Text("a"), "Text"),
        ({(1, 2): 3}, "tuple .*as a key"),
        ({True: 3}, "bool .*as a key"),
        (2**64, "int"),
        (torch.device("cpu"), "torch.device"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        ({1, 2}, "set"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(NotSendable, match=words):
        pack(value)


def test_limits_hold_when_sending_too() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value in (deep, [None] * 1_000_001):
        with pytest.raises(NotSendable, match="too large"):
            pack(value)


def test_tensors_in_any_memory_layout_keep_their_values() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for view in (base.permute(2, 0, 1), base[:, ::2], base[1:, :, 1], torch.complex(base, base).conj(), base.mT):
        assert torch.equal(unpack(pack(view)), view)


def test_the_order_of_dimensions_in_memory_is_kept() -> None:
    """Kernels may round differently in another one, and pixels would differ."""
    pictures = torch.rand(2, 3, 5, 7)
    for view in (pictures.movedim(1, -1), pictures.to(memory_format=torch.channels_last), pictures.mT):
        assert unpack(pack(view)).stride() == view.stride()


def test_memory_is_shared_when_sending_and_owned_when_receiving() -> None:
    tensor = torch.zeros(4)
    message = pack(tensor)
    received = unpack(message)
    tensor[0] = 1
    assert unpack(message)[0] == 1
    assert received[0] == 0


def test_a_message_of_which_nobody_else_has_use_is_not_copied() -> None:
    message = pack({"a": torch.zeros(4), "b": torch.zeros(2, 2, dtype=torch.bool)})
    arrived = Message(message.header, [memoryview(bytearray(buffer)) for buffer in message.buffers])
    received = unpack(arrived, take_over=True)
    arrived.buffers[0][:] = torch.ones(4).numpy().tobytes()
    assert received["a"].tolist() == [1, 1, 1, 1]
    assert not received["b"].any()


def test_received_tensors_lie_where_torch_would_put_them() -> None:
    """Kernels may round differently at other addresses. A message's own memory begins at any of them."""
    message = pack(torch.rand(1000, dtype=torch.float64))
    shifted = memoryview(bytearray(8003))[3:]
    shifted[:] = bytes(message.buffers[0])
    assert unpack(Message(message.header, [shifted])).data_ptr() % ALIGNMENT == 0
    frame = io.BytesIO()
    frames.Writer(frame).write(1, {}, [b"123", shifted])
    frame.seek(0)
    number, _, (_, part) = frames.read(frame) or (0, {}, [b"", b""])
    assert number == 1
    assert torch.frombuffer(part, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0


def test_a_small_message_cannot_take_much_memory() -> None:
    """A hundred megabytes of nothing are compressed to a hundredth: only what is allowed is expanded."""
    message = Message(zlib.compress(b" " * 100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError, match="is not whole or has not the length"):
            unpack(message)
        assert tracemalloc.get_traced_memory()[1] < 3 * codec.COMPRESSED.stop
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [codec.COMPRESSED.start, codec.COMPRESSED.stop - 1, codec.COMPRESSED.stop])
def test_headers_are_compressed_from_one_length_to_another(count: int) -> None:
    text = "x" * (count - 2)
    message = pack(text)
    assert (len(message.header) < count) is (count in codec.COMPRESSED)
    assert unpack(message) == text


def test_the_header_stays_small() -> None:
    """Bytes per call are at most the tensors and 4 KB, with the tokens of a text of a thousand words, too."""
    tokens = {"t5xxl": [[(number * 7919 % 32000, 1.0) for number in range(1000)]]}
    assert len(pack(tokens).header) < 4096
    value = {"handle": "h1", "x": torch.zeros(1, 16, 64, 64), "c": {"y": torch.zeros(1, 768), "sigmas": [1.0] * 20}}
    assert len(pack(value).header) < 400
    json.loads(pack(value).header)
