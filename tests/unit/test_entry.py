"""Two copies of the pack in one process, imported as ComfyUI imports a custom node: under the path of its folder."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.architecture import ROOT


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Copies the pack to a folder of that name and imports it, perhaps with a broken module.

    Nothing of it stays in this process.
    """
    before = set(sys.modules)

    def copied(name: str, broken: str | None = None) -> ModuleType:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(ROOT / "__init__.py", folder)
        shutil.copytree(ROOT / "multigpu", folder / "multigpu", ignore=shutil.ignore_patterns("__pycache__"))
        if broken is not None:
            (folder / "multigpu" / broken).write_text("raise OSError('broken')")
        spec = importlib.util.spec_from_file_location(str(folder).replace(".", "_x_"), folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    yield copied
    for name in set(sys.modules) - before:
        if name.startswith(str(tmp_path).replace(".", "_x_")):
            del sys.modules[name]
    logging.getLogger("multigpu").setLevel(logging.NOTSET)


def part(pack: ModuleType, name: str) -> ModuleType:
    return sys.modules[f"{pack.__name__}.multigpu.{name}"]


def test_a_copy_that_has_started_is_found_by_the_next_one(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    first, second = load("multigpu"), load("multigpu-main")
    assert part(second, "entry").first_copy() is None, "an import starts nothing"
    part(first, "runtime").current()
    assert second.WEB_DIRECTORY is None
    assert part(second, "entry").first_copy() == tmp_path / "multigpu"
    assert part(first, "entry").first_copy() is None


def test_without_what_the_routes_need_nothing_is_offered_to_the_frontend(load: Callable[[str], ModuleType]) -> None:
    pack = load("multigpu")
    assert not part(pack, "runtime").current().offers_panel and pack.WEB_DIRECTORY is None


def test_a_copy_that_could_not_start_is_no_copy(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken"):
        load("multigpu", broken="settings.py")
    assert part(load("multigpu-main"), "entry").first_copy() is None
