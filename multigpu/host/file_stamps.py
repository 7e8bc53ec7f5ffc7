"""Which files a model came from, and which version of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import folder_paths

from ..lifecycle.ledger import Stamp, stamp

MODEL_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".gguf")


def stamps_of(patchers: Iterable[Any], inputs: Mapping[str, Any]) -> frozenset[Stamp]:
    """The files behind patchers, as their loaders noted them; otherwise those that a node's inputs name."""
    paths = {path for patcher in patchers for path in _noted(getattr(patcher, "cached_patcher_init", None))}
    return frozenset(stamp(path) for path in paths or set(_named(inputs)))


def _noted(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if os.path.isfile(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _noted(item)


def _named(inputs: Mapping[str, Any]) -> Iterator[str]:
    """Files in the host's model folders that go by the name of an input."""
    for name in inputs.values():
        if isinstance(name, str) and name.lower().endswith(MODEL_FILES):
            for folder in list(folder_paths.folder_names_and_paths):
                path = folder_paths.get_full_path(folder, name)
                if path is not None:
                    yield path
