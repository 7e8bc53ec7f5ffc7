"""The model files that a subgraph names, as facts to be compared between machines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import folder_paths

from ...remote.facts import FileFact, normal_name
from ..model_files import MODEL_FILES

FIRST_BYTES = 65536
"""The part of a file whose hash is compared: the header, or its beginning, of every format."""


def named_files(inputs: Iterable[Mapping[str, Any]]) -> list[FileFact]:
    """The model files of this machine that the inputs of nodes name. None of them is opened."""
    found = {}
    for values in inputs:
        for value in values.values():
            if isinstance(value, str) and value.lower().endswith(MODEL_FILES):
                for kind, path in _paths(value):
                    name = f"{kind}/{normal_name(value)}"
                    found[name] = FileFact(name, os.path.getsize(path))
    return [found[name] for name in sorted(found)]


def files_here(names: Iterable[str]) -> list[FileFact]:
    """Those of the named files that this machine has, with the hash of their first bytes."""
    found = []
    for name in names:
        kind, _, file = name.partition("/")
        for path in (path for folder, path in _paths(file) if folder == kind):
            with open(path, "rb") as opened:
                header = hashlib.sha256(opened.read(FIRST_BYTES)).hexdigest()
            found.append(FileFact(name, os.path.getsize(path), header))
    return found


def _paths(name: str) -> Iterator[tuple[str, str]]:
    """The kinds of model folders that have a file of this name, and its path there."""
    for kind in list(folder_paths.folder_names_and_paths):
        for spelled in dict.fromkeys((name, normal_name(name), normal_name(name).replace("/", os.sep))):
            path = folder_paths.get_full_path(kind, spelled)
            if path is not None:
                yield kind, path
                break
