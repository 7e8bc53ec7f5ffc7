"""Read the tensors of a model from one file, from several shards, or from an index that names the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import ModelFileError
from .gguf_header import read_gguf
from .safetensors_header import read_safetensors
from .tensors import TensorInfo
from .untrusted import MOST_HEADER_BYTES, open_regular, parse_json, shown

INDEX_SUFFIX = ".json"
READERS: dict[str, Callable[[Path], list[TensorInfo]]] = {
    ".safetensors": read_safetensors,
    ".sft": read_safetensors,
    ".gguf": read_gguf,
}


def read_tensors(paths: Iterable[Path]) -> list[TensorInfo]:
    """The tensors of one model: several paths are its shards. Raises `ModelFileError` in one line."""
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        for shard in _shards(path):
            for tensor in _read(shard):
                if tensor.name in tensors:
                    raise ModelFileError(f"{shard} holds {tensor.name!r} again; several files are shards of one model")
                tensors[tensor.name] = tensor
    if not tensors:
        raise ModelFileError("the files hold no tensors; give the file of a model")
    return list(tensors.values())


def _read(path: Path) -> list[TensorInfo]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(READERS)
        raise ModelFileError(
            f"{path} is not a model file that can be read; give {known} or the index of shards (.json)"
        )
    try:
        return reader(path)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


def _shards(path: Path) -> list[Path]:
    """The files that an index names, beside it and in its order; any other path stands for itself."""
    if path.suffix.lower() != INDEX_SUFFIX:
        return [path]
    with open_regular(path) as file:
        text = file.read(MOST_HEADER_BYTES + 1)
    if len(text) > MOST_HEADER_BYTES:
        raise ModelFileError(f"{path} is too large for the index of a sharded model")
    try:
        names = list(dict.fromkeys(name for _, name in dict(parse_json(text))["weight_map"]))
    except (ValueError, KeyError, TypeError):
        raise ModelFileError(f"{path} is not the index of a sharded model: it has no weight_map") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFileError(f"{path} names the shard {shown(name)}; shards must be in the folder of their index")
    return [path.parent / name for name in names]
