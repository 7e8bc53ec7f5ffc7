"""The libraries that load models as oracles: files made at random, some sound, most damaged, read by them and by us.

Each seed makes the same file on every machine. What a library refuses, we refuse; what it accepts, we read with the
same names, types, shapes and bytes, but for the few damages that only we refuse, which are named here.
"""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multigpu.errors import ModelFileError
from multigpu.files import TensorInfo
from multigpu.files.gguf_header import read_gguf
from multigpu.files.safetensors_header import read_safetensors

FILES = 1500
Row = tuple[str, str, tuple[int, ...], int]
"""Name, type, shape and bytes of a tensor."""

ODD = [
    "0", "1", "-1", "-0", "1.0", "1e2", '"1"', "null", "true", "18446744073709551615", "18446744073709551616",
    "9" * 30, "9" * 400, "[]", "[0]", "{}", "NaN", "Infinity", "1e999", '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"',
]  # fmt: skip
SIZES = {"F64": 8, "C64": 8, "F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "BOOL": 1, "F6_E2M3": 0.75, "F4": 0.5}
SAFETENSORS_STRICTER = ("two entries for", "has more than dtype")
GGUF_STRICTER = ("overlaps", "no multiple of")


def random_safetensors(chance: random.Random) -> bytes:
    """Up to three tensors; in every second file something is wrong, or looks so."""

    def now_and_then(usual: Any, *others: Any) -> Any:
        return chance.choice(others) if chance.random() < 0.04 else usual

    entries = []
    if chance.random() < 0.3:
        metadata = ["{}", '{"a":"b"}', "null", '{"a":1}', '{"a":"b","a":"c"}', "[]", '{"a":"\\ud800"}']
        entries.append(f'"__metadata__":{chance.choice(metadata)}')
    at = 0
    for index in range(chance.randrange(4)):
        dtype = chance.choice(list(SIZES))
        shape = [chance.choice([0, 1, 2, 4, 8]) for _ in range(chance.randrange(4))]
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        begin = max(0, now_and_then(at, at - 1, at + 1, at + 4))
        end = begin + now_and_then(int(size), int(size) + 1)
        at = begin + int(size)
        fields = {"dtype": f'"{now_and_then(dtype, "F33", "f32", "")}"', "shape": json.dumps(shape),
                  "data_offsets": f"[{begin},{end}]"}  # fmt: skip
        name = chance.choice(list(fields))
        fields[name] = now_and_then(fields[name], *ODD, *(f"[{value}]" for value in ODD))
        rows = [f'"{key}":{value}' for key, value in fields.items()]
        rows = now_and_then(rows, rows[1:], rows + rows[:1], [*rows, f'"more":{chance.choice(ODD)}'])
        entries.append(f'"{chance.choice("aé")}{now_and_then(index, 0)}":{{{",".join(rows)}}}')
    chance.shuffle(entries)
    text = ("{" + ",".join(entries) + "}" + " " * chance.randrange(8)).encode()
    text = now_and_then(text, b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), text + b"\0", b"[" + text + b"]")
    length = now_and_then(len(text), len(text) + 1, len(text) - 1)
    return damaged(struct.pack("<Q", length) + text + bytes(now_and_then(at, at + 1)), chance, len(text) + 8)


def damaged(content: bytes, chance: random.Random, header: int) -> bytes:
    """One file in four with a byte or two of its header changed, one in twelve cut off."""
    changed = bytearray(content)
    for _ in range(chance.choice([0, 0, 0, 0, 0, 0, 1, 2])):
        changed[chance.randrange(header)] = chance.choice([0, 1, 255, *b'",[}1', chance.randrange(256)])
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.08 else changed)


def random_gguf(chance: random.Random) -> bytes:
    """Up to three fields and tensors, in either byte order; in every second file something is wrong, or looks so."""
    constants = pytest.importorskip("gguf.constants")
    order = chance.choice("<<<<>")

    def pack(form: str, *values: Any) -> bytes:
        return struct.pack(order + form, *values)

    def text(value: str) -> bytes:
        return pack("Q", len(value)) + value.encode()

    def value(kind: int) -> bytes:
        if kind == 9:
            inner, count = chance.choice([4, 8, 9]), chance.randrange(3)
            return pack("IQ", inner, count) + b"".join(value(inner) for _ in range(count))
        return {0: b"\1", 4: pack("I", 3), 6: pack("f", 1), 7: b"\1", 8: text("word"), 12: pack("d", 2)}[kind]

    alignment = chance.choice([32, 32, 64, 8, 1])
    fields = [text("general.alignment") + pack("II", 4, alignment)]
    if chance.random() < 0.3:
        fields, alignment = [], 32
    for index in range(chance.randrange(3)):
        kind = chance.choice([0, 4, 6, 7, 8, 9, 12])
        fields.append(text(f"key{index if chance.random() < 0.95 else 0}") + pack("I", kind) + value(kind))
    tensors, at = [], 0
    for index in range(chance.randrange(1, 4)):
        kind = chance.choice(list(constants.GGML_QUANT_SIZES))
        group, group_bytes = constants.GGML_QUANT_SIZES[kind]
        shape = [chance.choice([0, 1, 2, 3]) for _ in range(chance.choice([0, 1, 1, 2, 2, 3]))]
        if shape:
            shape[0] = shape[0] * group if chance.random() < 0.9 else chance.choice([1, 3, group + 1])
        offset = at if chance.random() < 0.9 else max(0, at + chance.choice([-alignment, alignment, 1]))
        size = group_bytes
        for dimension in shape:
            size *= dimension
        at = -(-(offset + size // group) // alignment) * alignment
        name = text(f"tensor{index if chance.random() < 0.95 else 0}")
        tensors.append(name + pack(f"I{len(shape)}QIQ", len(shape), *shape, kind, offset))
    header = b"GGUF" + pack("IQQ", chance.choice([2, 3]), len(tensors), len(fields)) + b"".join(fields + tensors)
    data = -len(header) % alignment + at
    return damaged(header + bytes(max(0, data + chance.choice([0, 0, 0, 0, -1, 5]))), chance, len(header))


def by_safetensors(path: Path) -> list[Row]:
    library = pytest.importorskip("safetensors")
    return [
        (name, info["dtype"], tuple(info["shape"]), len(info["data"]))
        for name, info in library.deserialize(path.read_bytes())
    ]


def by_gguf(path: Path) -> list[Row]:
    """The package's own reader, held back from reading beyond the file: it would go on for as long as a count says."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")

    class Reader(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(count) and int(offset) + int(count) * numpy.dtype(dtype).itemsize > len(self.data):
                raise ValueError("beyond the end of the file")
            return super()._get(offset, dtype, count, override_order)

    return [(t.name, t.tensor_type.name, tuple(t.shape.tolist())[::-1], int(t.n_bytes)) for t in Reader(path).tensors]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about numbers in damaged files
@pytest.mark.parametrize(
    ("make", "library", "read", "stricter"),
    [
        (random_safetensors, by_safetensors, read_safetensors, SAFETENSORS_STRICTER),
        (random_gguf, by_gguf, read_gguf, GGUF_STRICTER),
    ],
    ids=["safetensors", "gguf"],
)
def test_we_refuse_what_the_library_refuses_and_read_the_same_from_the_rest(
    tmp_path: Path,
    make: Callable[[random.Random], bytes],
    library: Callable[[Path], list[Row]],
    read: Callable[[Path], list[TensorInfo]],
    stricter: tuple[str, ...],
) -> None:
    path = tmp_path / "model"
    seen: Counter[str] = Counter()
    for seed in range(FILES):
        path.write_bytes(make(random.Random(seed)))
        try:
            expected: list[Row] | None = library(path)
        except Exception:  # noqa: BLE001 - a library refuses with whatever it happens to stumble over
            expected = None
        try:
            found: list[Row] | None = [(t.name, t.dtype, t.shape, t.bytes) for t in read(path)]
            reason = "accepted"
        except ModelFileError as error:
            found, reason = None, str(error)
        only_ours = next((word for word in stricter if word in reason), None)
        if expected is not None and only_ours:
            seen[only_ours] += 1
            continue
        assert (found and sorted(found)) == (expected and sorted(expected)), f"seed {seed}: {reason}"
        seen["refused" if expected is None else "accepted"] += 1
    assert min(seen["refused"], seen["accepted"]) > FILES // 5, seen
    assert all(seen[word] for word in stricter), seen
