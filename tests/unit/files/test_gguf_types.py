"""Every type of tensor that the gguf package knows, in files of its own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multigpu.files.gguf_header import read_gguf

from .model_files import write_gguf_types

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_a_type_is_read_as_the_package_reads_it(tmp_path: Path, kind: Any, version: int) -> None:
    path = tmp_path / "m.gguf"
    wrote = write_gguf_types(path, [kind], version)
    reader = gguf.GGUFReader(path)
    assert reader.fields["GGUF.version"].contents() == version
    theirs = [(t.name, t.tensor_type.name, tuple(t.shape.tolist())[::-1], int(t.n_bytes)) for t in reader.tensors]
    assert [(t.name, t.dtype, t.shape, t.bytes) for t in read_gguf(path)] == theirs == wrote
