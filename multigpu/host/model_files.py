"""Which files a model came from, and which version of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import folder_paths

from ..lifecycle.ledger import Stamp, stamp

MODEL_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".gguf")


def stamps_of(patchers: Iterable[Any], inputs: Iterable[Mapping[str, Any]]) -> frozenset[Stamp]:
    """Stamps of the files that patchers were loaded from, and of those that the inputs of nodes name."""
    paths = {path for patcher in patchers for path in files_of(patcher)}
    return frozenset(map(stamp, paths.union(*map(files_named, inputs))))


def files_of(patcher: Any) -> Iterator[str]:
    """The files a patcher was loaded from, as its loader has recorded them."""
    return _noted(getattr(patcher, "cached_patcher_init", None))


def _noted(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if os.path.isfile(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _noted(item)


def name_of(path: str) -> str | None:
    """A file's name under one of the host's model folders, as a loader's widget has it; None if it is in none."""
    for roots, _ in list(folder_paths.folder_names_and_paths.values()):
        for root in roots:
            if os.path.commonprefix([path, os.path.join(root, "")]) == os.path.join(root, ""):
                return os.path.relpath(path, root).replace(os.sep, "/")
    return None


def names_of(patchers: Iterable[Any]) -> dict[int, str]:
    """What log lines call models, by the `id` of each model: its class, and where several have it, the file as well.

    `Flux`, or `Flux from flux1-dev.safetensors` if there are several and the file is known.
    """
    models = {id(patcher.model): patcher for patcher in patchers}
    classes = {its: type(patcher.model).__name__ for its, patcher in models.items()}
    several = {name for name, count in Counter(classes.values()).items() if count > 1}
    files = {its: file_of(patcher) for its, patcher in models.items() if classes[its] in several}
    return {its: f"{name} from {files[its]}" if files.get(its) else name for its, name in classes.items()}


def file_of(patcher: Any) -> str | None:
    """The file a patcher was loaded from, as a loader's widget has it, if that is known."""
    return next(filter(None, map(name_of, files_of(patcher))), None)


def files_named(inputs: Mapping[str, Any]) -> Iterator[str]:
    """Model files in the host's folders that an input names, and all in a diffusers folder that an input names."""
    for name in inputs.values():
        if isinstance(name, str) and name.lower().endswith(MODEL_FILES):
            for folder in list(folder_paths.folder_names_and_paths):
                path = folder_paths.get_full_path(folder, name)
                if path is not None:
                    yield path
        elif isinstance(name, str):
            for root in folder_paths.get_folder_paths("diffusers"):
                yield from _inside(os.path.join(root, name))


def _inside(folder: str) -> Iterator[str]:
    if os.path.isfile(os.path.join(folder, "model_index.json")):
        for where, _, files in os.walk(folder):
            yield from (os.path.join(where, file) for file in files if file.lower().endswith(MODEL_FILES))
