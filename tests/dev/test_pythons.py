"""Other Pythons: which are found, what runs with them, and what an old one is told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import pythons
from devtools.guard import BASE_PYTHON
from devtools.places import Places
from devtools.suite import COVERED, PARTS, Task, counted, finished, outcome, selecting
from tests.unit.test_minimums import LOAD

OWN = ".".join(map(str, sys.version_info[:2]))
OTHERS = [version for version in pythons.SUPPORTED if version != OWN]


class Elsewhere(Places):
    """Another clone with the packages and pins of this one."""

    python, requirements = Places.here().python, Places.here().requirements


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for Pythons, on a machine that has no others: `first` and `second` are in PATH, `pyenv` is pyenv's."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def _link(path: Path) -> Path:
    """This Python under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(BASE_PYTHON)
    return path


def test_a_command_that_does_not_run_is_passed_over(machine: Path) -> None:
    (machine / "first").mkdir()
    (machine / "first" / f"python{OWN}").write_text("#!/bin/sh\necho 'this version is not chosen' >&2\nexit 127\n")
    (machine / "first" / f"python{OWN}").chmod(0o755)
    assert pythons.find(OWN) is None
    second = _link(machine / "second" / f"python{OWN}")
    assert pythons.find(OWN) == second


def test_a_python_of_another_version_than_its_name_is_passed_over(machine: Path) -> None:
    for version in OTHERS:
        _link(machine / "first" / f"python{version}")
    assert list(pythons.others()) == OTHERS and not any(pythons.others().values())


def test_the_newest_of_pyenv_comes_after_those_in_path(machine: Path) -> None:
    for name in (f"{OWN}.2", f"{OWN}.10", f"{OWN}.9", f"{OWN}.11rc1", f"{OWN}-dev"):
        _link(machine / "pyenv" / "versions" / name / "bin" / "python")
    assert pythons.find(OWN) == machine / "pyenv" / "versions" / f"{OWN}.10" / "bin" / "python"
    first = _link(machine / "first" / f"python{OWN}")
    assert pythons.find(OWN) == first


def test_a_machine_without_other_pythons(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pythons.prepare(Places(root=machine, cache=machine)) == {}
    expected = f"  Python {', '.join(OTHERS)}: not found, so no unit tests run with it\n"
    assert capsys.readouterr().out == expected
    assert list(machine.iterdir()) == []


TESTS = {
    "good": "import gguf, hypothesis, safetensors\n\n\ndef test_one():\n    pass\n",
    "torch": "import torch\n\n\ndef test_two():\n    pass\n",
    "through": "import tests.unit.inner\n\n\ndef test_three():\n    pass\n",
    "broken": "import torch_of_mine\n",
}


def test_only_files_that_need_torch_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an environment that is made as for another Python, in a repository of four files of tests."""
    places = Elsewhere(root=tmp_path / "clone", cache=tmp_path)
    folder = places.root / "tests" / "unit"
    folder.mkdir(parents=True)
    shutil.copy(Places.here().root / "pyproject.toml", places.root)
    shutil.copy(Places.here().root / "tests" / "unit" / "conftest.py", folder)
    (folder / "inner.py").write_text("import torch.nn\n")
    for name, source in TESTS.items():
        (folder / f"test_{name}.py").write_text(source)
    python = pythons.environment_for(OWN, Path(BASE_PYTHON), places)
    assert pythons.environment_for(OWN, Path(BASE_PYTHON), places) == python
    assert capsys.readouterr().out.splitlines()[-1] == f"  Python {OWN}: ready"

    command = ("pytest", "tests/unit", "-q", "--color=no", "--continue-on-collection-errors")
    ((task, code, text, _),) = finished([Task("unit", command, python=python)], places)
    counts, notes = outcome(task, code, text)
    assert counted(counts) == "1 passed, 1 failed, 0 skipped", text
    expected = "LEFT OUT 2 files that import torch, which is not installed here: test_through.py, test_torch.py"
    assert sorted(notes) == ["ERROR tests/unit/test_broken.py", expected]


def test_selected_tests_have_no_coverage_limit() -> None:
    unit, _ = PARTS["unit"]
    assert {*COVERED} <= {*unit.command}
    assert selecting(unit, "some").command[-2:] == ("-k", "some")
    assert not {*COVERED} & {*selecting(unit, "some").command}


TOO_OLD = next(filter(None, map(pythons.find, ("3.9", "3.8", "3.7"))), None)


@pytest.mark.skipif(TOO_OLD is None, reason="no Python 3.7 to 3.9 is installed")
def test_a_real_old_python_gets_the_sentence() -> None:
    command = [str(TOO_OLD), "-B", "-c", LOAD, str(Places.here().root / "__init__.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("['NODE_CLASS_MAPPINGS'] False\n")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("[MultiGPU] is not loaded: it needs Python 3.10 or newer, and this is Python 3.")
