"""Header readers: good files, and files that are anything but."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu.errors import ModelFileError
from multigpu.files import read_tensors
from multigpu.files.gguf_header import read_gguf
from multigpu.files.safetensors_header import read_safetensors

from .model_files import write_gguf, write_raw_safetensors, write_safetensors

SMALL = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 2)}


def one_line(error: pytest.ExceptionInfo[ModelFileError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_safetensors(tmp_path: Path) -> None:
    tensors = read_safetensors(write_safetensors(tmp_path / "m.safetensors", SMALL))
    assert [(t.name, t.dtype, t.shape, t.bytes) for t in tensors] == [
        ("a.weight", "BF16", (4, 3), 24),
        ("a.bias", "BF16", (4,), 8),
        ("b.weight", "BF16", (2, 2), 8),
    ]
    assert tensors[0].elements == 12


def test_gguf_agrees_with_the_packages_own_writer_and_reader(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_array("words", ["a", "bb", "ccc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("f", 0.5)
    writer.add_bool("yes", True)
    writer.add_tensor("a.weight", numpy.zeros((6, 32), dtype=numpy.float16))
    writer.add_tensor("b.weight", numpy.zeros((3, 64), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist())[::-1], t.n_bytes) for t in gguf.GGUFReader(path).tensors
    ]
    assert [(t.name, t.dtype, t.shape, t.bytes) for t in read_gguf(path)] == theirs


def test_gguf_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ModelFileError, match=r'pip install "multigpu\[gguf\]"'):
        read_gguf(path)


def test_shards_and_their_index(tmp_path: Path) -> None:
    first = write_safetensors(tmp_path / "m-00001-of-00002.safetensors", {"a.weight": (2, 2)})
    second = write_safetensors(tmp_path / "m-00002-of-00002.safetensors", {"b.weight": (3, 3)})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": first.name, "b.weight": second.name}}))
    assert read_tensors([index]) == read_tensors([first, second])
    assert [t.name for t in read_tensors([index])] == ["a.weight", "b.weight"]


def test_two_models_are_not_shards_of_one(tmp_path: Path) -> None:
    paths = [write_safetensors(tmp_path / name, SMALL) for name in ("a.safetensors", "b.safetensors")]
    with pytest.raises(ModelFileError, match="shards of one model") as error:
        read_tensors(paths)
    one_line(error)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[]", "no weight_map"),
        (b"{}", "no weight_map"),
        (b"not json", "no weight_map"),
        (b'{"weight_map": [1]}', "no weight_map"),
        (b"[" * 100_000, "no weight_map"),
        (b'{"weight_map": {"a": "../../secret.safetensors"}}', "in the folder of their index"),
        (b'{"weight_map": {"a": 3}}', "in the folder of their index"),
        (b'{"weight_map": {"a": "bad\\u0000.safetensors"}}', "no file can have this name"),
        (b'{"weight_map": {"a": "bad\\ud800.safetensors"}}', "no file can have this name"),
        (b'{"weight_map": {"a": "' + b"n" * 300 + b'.safetensors"}}', "cannot be read: File name too long"),
        (b'{"weight_map": {"a": []}}', "no weight_map"),
        (b'{"weight_map": {"a": "missing.safetensors"}}', "cannot be read: No such file"),
        (b'{"weight_map": {}}', "hold no tensors"),
    ],
)
def test_bad_indices(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.index.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as error:
        read_tensors([path])
    one_line(error)


def test_an_index_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.index.json"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ModelFileError, match="too large"):
        read_tensors([path])


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf", "m.index.json"])
def test_files_that_are_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_tensors([tmp_path / name])
    (tmp_path / name).mkdir()
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_tensors([tmp_path / name])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf", "m.index.json"])
def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path, name: str) -> None:
    """Opening a pipe that nobody writes to would wait for ever, reading a device would never end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match="cannot be read: it is a pipe"):
        read_tensors([tmp_path / name])
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match="cannot be read: it is a device"):
        read_tensors([tmp_path / name])


def test_other_files_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"give \.safetensors, \.sft, \.gguf or"):
        read_tensors([tmp_path / "model.ckpt"])


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
AS_TEXT = json.dumps(ENTRY)


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[1]", "not a JSON object"),
        (b"{" * 50_000, "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xff\xfe{}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ("{}".encode("utf-16"), "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON .the number '999"),
        (b'{"a": NaN}', "NaN is not a number"),
        (header(a=3), "does not have dtype, shape and data_offsets, each once"),
        (header(a={**ENTRY, "data_offsets": [4]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "data_offsets": [0, 4, 4]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "data_offsets": [4, 0]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "data_offsets": {"begin": 0, "end": 4}}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": [-2]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": [True]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": [2.0]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": ["2"]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": ["9" * 400]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": [10**300]}), "wrong shape or wrong data_offsets"),
        (header(a={**ENTRY, "shape": [10**400]}), "is too large"),
        (header(a={**ENTRY, "shape": [2**63, 2**63, 0]}), "does not fit its 4 bytes"),
        (header(a={**ENTRY, "shape": [3]}), "BF16 of shape"),
        (header(a={**ENTRY, "dtype": "F4", "shape": [7]}), "F4 of shape"),
        (header(a={**ENTRY, "dtype": 7}), "unknown dtype 7; update MultiGPU"),
        (header(a={**ENTRY, "dtype": "F33"}), "unknown dtype 'F33'; update MultiGPU"),
        (header(a={**ENTRY, "more": []}), "has more than dtype, shape and data_offsets"),
        (header(a={**ENTRY, "shape": [2**62], "data_offsets": [0, 2**63]}), "cut short, since 'a' ends at byte"),
        (header(a=ENTRY, b=ENTRY), "'b' starts at byte 0 of the data, which overlaps another"),
        (header(a={**ENTRY, "shape": [1], "data_offsets": [2, 4]}), "which leaves a gap of 2 bytes"),
        (header(a={**ENTRY, "shape": [1], "data_offsets": [0, 2]}), "2 bytes at its end belong to no tensor"),
        (b'{"a": %b, "a": %b}' % (AS_TEXT.encode(), AS_TEXT.encode()), "two entries for 'a'"),
        (b'{"a": %b}' % AS_TEXT.replace("{", '{"dtype": "BF16", ').encode(), "each once"),
        (b'{"\\ud800": %b}' % AS_TEXT.encode(), "half of a surrogate pair"),
        (header(__metadata__={"a": 1}, a=ENTRY), "__metadata__ is not a JSON object with texts"),
        (b'{"__metadata__": {"a": "\\ud800"}, "a": %b}' % AS_TEXT.encode(), "half of a surrogate pair"),
    ],
)
def test_bad_safetensors_headers(tmp_path: Path, text: bytes, says: str) -> None:
    path = write_raw_safetensors(tmp_path / "m.safetensors", text, 4)
    with pytest.raises(ModelFileError, match=says) as error:
        read_tensors([path])
    assert len(one_line(error)) < 500


def test_a_header_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="hold no tensors"):
        read_tensors([write_raw_safetensors(tmp_path / "m.safetensors", header(__metadata__={}), 0)])


def test_a_message_shows_the_start_of_a_long_name(tmp_path: Path) -> None:
    path = write_raw_safetensors(tmp_path / "m.safetensors", header(**{"n" * 10**6: 3}), 0)
    with pytest.raises(ModelFileError, match="'nnn.*nnn[.][.][.] does not have") as error:
        read_tensors([path])
    assert len(one_line(error)) < 500


@pytest.mark.parametrize(
    "content", [b"", b"\x01", struct.pack("<Q", 2**62), struct.pack("<Q", 100) + b"{}", b"PK\x03\x04" * 8]
)
def test_bad_safetensors_lengths(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="claims a header of"):
        read_tensors([path])


def test_a_header_as_large_as_the_file_claims_is_refused_above_the_formats_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**33)
    with pytest.raises(ModelFileError, match="claims a header of 4294967296"):
        read_tensors([path])


def gguf_start(tensors: int, fields: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    form = f"<I{len(shape)}QIQ"
    return struct.pack("<Q", len(name)) + name + struct.pack(form, len(shape), *reversed(shape), kind, offset)


Q8_0, F32, BF16 = 8, 0, 30


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not start with"),
        (b"GGML" + bytes(40), "does not start with"),
        (gguf_start(0, 0, version=1), "version 1;"),
        (gguf_start(2**62, 0), "entries, more than"),
        (gguf_start(0, 2**62), "entries, more than"),
        (gguf_start(1, 0) + struct.pack("<Q", 2**62) + bytes(40), "header is longer than the 72 bytes that it has"),
        (gguf_start(0, 1) + key(b"k", 99), "value of type 99"),
        (gguf_start(0, 1) + key(b"k", 9) + struct.pack("<IQ", 0, 2**60), "entries, more than"),
        (gguf_start(0, 1) + key(b"k", 8) + struct.pack("<Q", 2**60), "header is longer than the"),
        (gguf_start(0, 1) + key(b"k", 9) + struct.pack("<IQ", 9, 1) * 10_000, "value of type 9, 100 arrays deep"),
        (gguf_start(0, 1) + key(b"\xff", 4) + bytes(4), "can't decode"),
        (gguf_start(0, 2) + (key(b"k", 4) + bytes(4)) * 2, "two metadata fields 'k'"),
        (gguf_start(0, 1) + key(b"GGUF.version", 4) + bytes(4), "two metadata fields 'GGUF.version'"),
        (gguf_start(0, 1) + key(b"general.alignment", 4) + bytes(4), "alignment is not a power of two"),
        (gguf_start(0, 1) + key(b"general.alignment", 4) + struct.pack("<I", 48), "alignment is not a power of two"),
        (gguf_start(0, 1) + key(b"general.alignment", 10) + struct.pack("<Q", 32), "alignment is not a power of two"),
        (gguf_start(1, 0) + struct.pack("<QI", 0, 99) + bytes(40), "99 dimensions"),
        (gguf_start(1, 0) + tensor(b"a", (4,), 9999, 0), "unknown type 9999; update the gguf package"),
        (gguf_start(1, 0) + tensor(b"a", (2**40,), F32, 0) + bytes(40), "cut short"),
        (gguf_start(1, 0) + tensor(b"a", (2**62, 2**62, 0), F32, 0) + bytes(40), "impossible shape"),
        (
            gguf_start(1, 0) + tensor(b"a", (2, 33), Q8_0, 0) + bytes(200),
            "in groups of 32, and its rows have 33 elements",
        ),
        (
            gguf_start(1, 0) + tensor(b"a", (32, 2), Q8_0, 0) + bytes(200),
            "in groups of 32, and its rows have 2 elements",
        ),
        (gguf_start(1, 0) + tensor(b"a", (), BF16, 0) + bytes(200), "in groups of 1"),
        (gguf_start(1, 0) + tensor(b"a", (2,), F32, 4) + bytes(200), "at byte 4 of the data, no multiple of 32"),
        (gguf_start(1, 0) + tensor(b"\xff", (2,), F32, 0) + bytes(200), "can't decode"),
        (gguf_start(2, 0) + tensor(b"a", (2,), F32, 0) * 2 + bytes(200), "two tensors 'a'"),
        (gguf_start(2, 0) + tensor(b"a", (9,), F32, 0) + tensor(b"b", (2,), F32, 32) + bytes(200), "'b' overlaps 'a'"),
        (gguf_start(0, 0), "hold no tensors"),
    ],
)
def test_bad_gguf_files(tmp_path: Path, content: bytes, says: str) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as error:
        read_tensors([path])
    one_line(error)


def test_a_gguf_header_that_goes_on_for_gigabytes_is_given_up(tmp_path: Path) -> None:
    """A file full of empty texts, eight zeros each, which takes no room on the disk."""
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(gguf_start(1, 1) + key(b"k", 9) + struct.pack("<IQ", 8, 2**33))
        file.truncate(2**37)
    with pytest.raises(ModelFileError, match="entries, more than"):
        read_tensors([path])


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from(["m.safetensors", "m.gguf"]), st.booleans(), st.integers(0, 400))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, name: str, damage: bool, at: int
) -> None:
    """Noise, and good files with noise written over a part of them."""
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("noise") / name
    if damage:
        (write_gguf if name.endswith("gguf") else write_safetensors)(path, SMALL)
        good = path.read_bytes()
        noise = good[:at] + noise[:8] + good[at + len(noise[:8]) :]
    path.write_bytes(noise)
    try:
        tensors = read_tensors([path])
    except ModelFileError as error:
        assert "\n" not in str(error)
    else:
        assert sum(tensor.bytes for tensor in tensors) >= 0
