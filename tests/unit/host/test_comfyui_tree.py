"""Which ComfyUI `multigpu doctor` looks at when nobody says which. (The comparison is tested on a real one.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIND = "from multigpu.host.comfyui_tree import find_tree; print(find_tree())"
ANYWHERE = "/"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links that need no rights, and a POSIX shell")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What looks like a ComfyUI, with this clone linked into it."""
    tree = tmp_path / "ComfyUI"
    for folder in ("comfy", "custom_nodes", "elsewhere"):
        (tree / folder).mkdir(parents=True)
    (tree / "comfy" / "model_management.py").touch()
    (tree / "custom_nodes" / "multigpu").symlink_to(ROOT, target_is_directory=True)
    return tree


def found(folder: Path | str, **environment: str) -> str:
    """What is found by somebody who goes to a folder in a shell and starts Python there."""
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), sys.executable, "-c", FIND]
    kept = {key: value for key, value in os.environ.items() if key not in ("PWD", "PYTHONPATH")}
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_the_pack_may_be_a_link(tree: Path) -> None:
    pack = tree / "custom_nodes" / "multigpu"
    assert found(pack) == str(tree)
    assert found(pack / "multigpu" / "cli", PYTHONPATH=str(ROOT)) == str(tree)


def test_the_path_of_the_import_counts_where_the_current_folder_says_nothing(tree: Path) -> None:
    assert found(ANYWHERE, PYTHONPATH=str(tree / "custom_nodes" / "multigpu")) == str(tree)


def test_the_current_folder_comes_first(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "comfy"
    other.mkdir(parents=True)
    (other / "model_management.py").touch()
    pack = str(tree / "custom_nodes" / "multigpu")
    assert found(other, PYTHONPATH=pack) == str(other.parent)
    assert found(tree / "elsewhere", PYTHONPATH=str(ROOT)) == str(tree)


def test_without_a_comfyui_there_is_none(tree: Path) -> None:
    assert found(ROOT) == "None"
    assert found(ANYWHERE, PYTHONPATH=str(ROOT)) == "None"


def test_a_pwd_of_another_folder_says_nothing(tree: Path) -> None:
    """Programs that start others elsewhere, without a shell, leave PWD as it was."""
    for stale in (str(tree), "no/absolute/path", "/is/not/there"):
        for folder, expected in ((ROOT, "None"), (tree / "elsewhere", str(tree))):
            environment = {**os.environ, "PWD": stale, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", FIND]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60)
            assert done.stdout.decode().strip() == expected, done.stderr.decode()
