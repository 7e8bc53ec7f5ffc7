"""Which of the host's functions, classes and methods are no longer the objects they were."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

HOST_PACKAGES = {
    "__main__", "app", "comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths",
    "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip

KEPT_LISTS = {"comfy.model_management": ("current_loaded_models",)}
"""Objects that are not callable and must stay the same objects all the same."""


class Snapshot:
    """Holds the objects themselves, so that no id can be used again by another."""

    def __init__(self, objects: dict[tuple[str, str | None, str], Any]) -> None:
        self._objects = objects

    @classmethod
    def of_the_host(cls) -> Snapshot:
        objects: dict[tuple[str, str | None, str], Any] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and name.partition(".")[0] in HOST_PACKAGES:
                objects |= _of_module(name, module)
        return cls(objects)

    def __len__(self) -> int:
        return len(self._objects)

    def differences(self) -> list[dict[str, str]]:
        """One entry per object that was replaced or removed since, with the file that its successor comes from."""
        found = []
        for (module_name, class_name, attribute), before in self._objects.items():
            owner: Any = sys.modules.get(module_name)
            if class_name is not None:
                owner = vars(owner).get(class_name) if owner else None
            now = vars(owner).get(attribute) if owner is not None else None
            if now is not before:
                name = ".".join(part for part in (module_name, class_name, attribute) if part)
                found.append({"name": name, "now": repr(now), "from": _source(now)})
        return found


def _of_module(name: str, module: ModuleType) -> dict[tuple[str, str | None, str], Any]:
    objects: dict[tuple[str, str | None, str], Any] = {}
    for attribute, value in list(vars(module).items()):
        if callable(value) or attribute in KEPT_LISTS.get(name, ()):
            objects[name, None, attribute] = value
        if inspect.isclass(value) and value.__module__ == name:
            for member, content in list(vars(value).items()):
                if callable(content) or isinstance(content, (classmethod, staticmethod, property)):
                    objects[name, attribute, member] = content
    return objects


def _source(value: Any) -> str:
    try:
        return inspect.getsourcefile(inspect.unwrap(value)) or "unknown"
    except (TypeError, ValueError):
        return "unknown"
