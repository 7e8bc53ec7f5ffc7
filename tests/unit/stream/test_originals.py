"""Reading weights back from a model file: only what the file held when it was opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multigpu.errors import HostError
from multigpu.stream.originals import FileOriginal, KeptOriginal, ModelFiles

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"block.weight": WEIGHT, "block.empty": torch.empty(0, 4)}, file)
    return file


def files(path: Path) -> ModelFiles:
    return ModelFiles([str(path)])


def test_a_weight_of_the_file_is_read_again_when_it_is_wanted(path: Path) -> None:
    original = files(path).original("diffusion_model.block.weight", WEIGHT, ())
    assert isinstance(original, FileOriginal)
    assert torch.equal(original.weight, WEIGHT)
    original.weight.zero_()
    assert torch.equal(original.weight, WEIGHT), "what is given out is a copy"
    half = files(path).original("block.weight", WEIGHT.half(), ())
    assert isinstance(half, FileOriginal) and half.weight.dtype == torch.float16


@pytest.mark.parametrize("weight", [WEIGHT + 1, WEIGHT.T, torch.empty(0, 4)])
def test_a_weight_that_the_file_does_not_hold_is_kept(path: Path, weight: torch.Tensor) -> None:
    original = files(path).original("block.empty" if not weight.numel() else "block.weight", weight, ())
    assert isinstance(original, KeptOriginal) and torch.equal(original.weight, weight)


@pytest.mark.parametrize("contents", [b"", b"short", (200).to_bytes(8, "little") + b"no header" * 30])
def test_whatever_lies_where_the_file_was(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    assert isinstance(files(path).original("block.weight", WEIGHT, ()), KeptOriginal)


def test_another_file_of_the_same_name_is_not_read(path: Path) -> None:
    original = files(path).original("block.weight", WEIGHT, ())
    save_file({"block.weight": WEIGHT + 1}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    assert torch.equal(original.weight, WEIGHT)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_was_changed_in_place_is_refused(path: Path, when: str) -> None:
    original = files(path).original("block.weight", WEIGHT, ())
    assert isinstance(original, FileOriginal)
    later = (os.stat(path).st_mtime_ns + 10**6,) * 2
    if when == "before":
        os.utime(path, ns=later)
    with pytest.raises(HostError, match="changed on disk"), original.reading():
        os.utime(path, ns=later)
