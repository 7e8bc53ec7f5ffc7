"""The oldest versions: what is older is refused with a sentence, and the files that say so can be read by it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from multigpu.minimums import too_old
from tests.unit.architecture import ROOT

ENOUGH = [
    ((3, 10, 0), "2.4.0"), ((3, 10, 13), "2.4.1+cu121"), ((3, 13, 0), "2.13.0+cpu"), ((4, 0, 0), "3.0"),
    ((3, 11, 7), "2.10.0a0+git3f0a"), ((3, 11, 7), None), ((3, 11, 7), "nightly"),
]  # fmt: skip

TOO_OLD = [
    ((3, 9, 18), "2.13.0", "needs Python 3.10 or newer, and this is Python 3.9.18; run ComfyUI with a newer one"),
    ((2, 7, 18), None, "needs Python 3.10 or newer, and this is Python 2.7.18; run ComfyUI with a newer one"),
    (
        (3, 12, 1),
        "2.3.1+cu121",
        "needs torch 2.4 or newer, and this is torch 2.3.1+cu121; update it in the Python",
    ),
    ((3, 12, 1), "1.13.1", "needs torch 2.4 or newer, and this is torch 1.13.1; update it in the Python"),
]


@pytest.mark.parametrize(("python", "torch"), ENOUGH)
def test_new_enough(python: tuple[int, ...], torch: str | None) -> None:
    assert too_old(python, torch) is None


@pytest.mark.parametrize(("python", "torch", "sentence"), TOO_OLD)
def test_too_old(python: tuple[int, ...], torch: str | None, sentence: str) -> None:
    found = too_old(python, torch)
    assert found is not None and sentence in found and found.endswith(", or remove the pack")


LOAD = """
import importlib.util, sys
if sys.argv[2:]:
    sys.version_info = (3, 9, 18, "final", 0)
spec = importlib.util.spec_from_file_location("pack", sys.argv[1])
pack = sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
print(sorted(name for name in vars(pack) if name.isupper()), hasattr(pack, "comfy_entrypoint"))
print(sorted(name for name in sys.modules if name.startswith("pack.multigpu")))
"""


def test_an_old_python_gets_the_sentence_and_nothing_else() -> None:
    command = [sys.executable, "-c", LOAD, str(ROOT / "__init__.py"), "pretend"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = ["['NODE_CLASS_MAPPINGS'] False", "['pack.multigpu', 'pack.multigpu.minimums']"]
    assert ran.stdout.splitlines() == expected
    (line,) = ran.stderr.splitlines()
    assert line.startswith("[MultiGPU] is not loaded: it needs Python 3.10 or newer, and this is Python 3.9.18; ")


def test_this_python_gets_the_entry() -> None:
    """So what the test above has found comes from the version."""
    command = [sys.executable, "-c", LOAD, str(ROOT / "__init__.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("[] True\n") and ran.stderr == ""


@pytest.mark.parametrize("file", ["__init__.py", "multigpu/__init__.py", "multigpu/minimums.py"])
def test_old_pythons_can_read_what_refuses_them(file: str) -> None:
    ast.parse((ROOT / file).read_text(encoding="utf-8"), feature_version=(3, 7))
