"""Header readers: good files, and files that are anything but."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_K"])
def test_gguf_sizes_are_those_of_the_package(tmp_path: Path, kind: str) -> None:
    constants = pytest.importorskip("gguf.constants")
    number = constants.GGMLQuantizationType[kind]
    group, size = constants.GGML_QUANT_SIZES[number]
    path = write_gguf(tmp_path / "m.gguf", {"x.weight": (16, 512)}, kind=int(number), strings=["a", "", "ccc"])
    (tensor,) = read_gguf(path)
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x.weight", kind, (16, 512))
    assert tensor.bytes == 16 * 512 // group * size


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
        (b'{"weight_map": {"a": "../../secret.safetensors"}}', "beside their index"),
        (b'{"weight_map": {"a": 3}}', "beside their index"),
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


def test_other_files_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"give \.safetensors, \.sft, \.gguf or"):
        read_tensors([tmp_path / "model.ckpt"])


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[1]", "is a list"),
        (b"{" * 50_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (json.dumps({"a": 3}).encode(), "lacks dtype"),
        (json.dumps({"a": {**ENTRY, "data_offsets": [4]}}).encode(), "lacks dtype"),
        (json.dumps({"a": {**ENTRY, "shape": [-2]}}).encode(), "wrong dtype"),
        (json.dumps({"a": {**ENTRY, "shape": [True]}}).encode(), "wrong dtype"),
        (json.dumps({"a": {**ENTRY, "dtype": 7}}).encode(), "wrong dtype"),
        (json.dumps({"a": {**ENTRY, "data_offsets": [4, 0]}}).encode(), "wrong dtype"),
        (json.dumps({"a": {**ENTRY, "data_offsets": [0, 2**63]}}).encode(), "cut short"),
        (json.dumps({"a": {**ENTRY, "shape": [3]}}).encode(), "BF16 of shape"),
        (json.dumps({"__metadata__": {}}).encode(), "hold no tensors"),
    ],
)
def test_bad_safetensors_headers(tmp_path: Path, header: bytes, says: str) -> None:
    path = write_raw_safetensors(tmp_path / "m.safetensors", header, 4)
    with pytest.raises(ModelFileError, match=says) as error:
        read_tensors([path])
    one_line(error)


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


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not start with"),
        (b"GGML" + bytes(40), "does not start with"),
        (gguf_start(0, 0, version=1), "version 1;"),
        (gguf_start(0, 0, version=0x03000000), "little-endian"),
        (gguf_start(2**62, 0), "entries, more than"),
        (gguf_start(0, 2**62), "entries, more than"),
        (gguf_start(1, 0) + struct.pack("<Q", 2**62) + bytes(40), "ends beyond the file"),
        (gguf_start(0, 1) + key(b"k", 99), "value of type 99"),
        (gguf_start(0, 1) + key(b"k", 9) + struct.pack("<IQ", 0, 2**60), "entries, more than"),
        (gguf_start(0, 1) + key(b"k", 8) + struct.pack("<Q", 2**60), "ends beyond the file"),
        (gguf_start(0, 1) + key(b"k", 9) + struct.pack("<IQ", 9, 1) * 8 + bytes(64), "value of type 9"),
        (gguf_start(0, 1) + key(b"general.alignment", 4) + bytes(4), "alignment of 0"),
        (gguf_start(1, 0) + struct.pack("<QI", 0, 99) + bytes(40), "99 dimensions"),
        (gguf_start(1, 0) + struct.pack("<QIQIQ", 0, 1, 4, 9999, 0) + bytes(40), "unknown type 9999"),
        (gguf_start(1, 0) + struct.pack("<QIQIQ", 0, 1, 2**40, 0, 0) + bytes(40), "cut short"),
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
