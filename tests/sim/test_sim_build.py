"""Built once, by one process, kept apart by all that could change it; skipped clearly where there is no compiler."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import simdev
from tests.sim.simdev import builder

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in that takes a while, notes every call and writes what it is told as `-o`."""
    script = tmp_path / "slow-compiler"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo stand-in 1.0; exit; fi\n'
        f'echo call >> "{tmp_path}/calls"\n'
        "sleep 0.5\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'echo half > "$2"; sleep 0.5; echo whole > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_two_processes_build_once(compiler, tmp_path):
    program = (
        "import importlib.util, pathlib, sys;"
        "spec = importlib.util.spec_from_file_location('builder', sys.argv[1]);"
        "builder = importlib.util.module_from_spec(spec); spec.loader.exec_module(builder);"
        "print(builder.build('cuda', pathlib.Path(sys.argv[2])).read_text())"
    )
    command = [sys.executable, "-c", program, builder.__file__, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in both]
    assert outputs == ["whole", "whole"]
    assert (tmp_path / "calls").read_text() == "call\n"
    assert builder.build("cuda", tmp_path / "cache").read_text().strip() == "whole"
    assert (tmp_path / "calls").read_text() == "call\n"


def test_the_key_covers_all_that_matters(tmp_path, monkeypatch, compiler):
    keys = [builder.build_key("cuda", str(compiler)), builder.build_key("npu", str(compiler))]
    other = tmp_path / "other-compiler"
    other.write_text(compiler.read_text().replace("1.0", "2.0"))
    other.chmod(0o755)
    keys.append(builder.build_key("cuda", str(other)))
    with monkeypatch.context() as patch:
        patch.setattr(builder.importlib.metadata, "version", lambda name: "0.0")
        keys.append(builder.build_key("cuda", str(compiler)))
    changed = tmp_path / "csrc"
    changed.mkdir()
    for source in builder.SOURCES.iterdir():
        (changed / source.name).write_bytes(source.read_bytes())
    (changed / "world.h").write_text((changed / "world.h").read_text() + "// changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(builder, "SOURCES", changed)
        keys.append(builder.build_key("cuda", str(compiler)))
    assert len(set(keys)) == len(keys)
    assert builder.build_key("cuda", str(compiler)) == keys[0]


def test_a_failing_compiler_is_an_error_with_its_words(tmp_path, monkeypatch, compiler):
    compiler.write_text('#!/bin/sh\nif [ "$1" = --version ]; then exit; fi\necho all.cpp: no such luck >&2\nexit 1\n')
    with pytest.raises(RuntimeError, match="no such luck"):
        simdev.build("cuda", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "surely-not-a-compiler")
    with pytest.raises(simdev.NoCompiler, match="looked for surely-not-a-compiler on PATH"):
        builder.find_compiler()


INNER_TESTS = """
import torch
def test_uses_a_device(sim):
    torch.ones(4).to(sim.device(0))
def test_races(sim):
    api = torch.get_device_module(sim.kind)
    target = torch.zeros(4, device=sim.device(0))
    with api.stream(api.Stream(sim.device(0))):
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
"""


def inner_pytest(folder: Path, **environment: str) -> str:
    """Run two small tests with this folder's fixtures in a pytest of their own."""
    (folder / "conftest.py").write_text("from tests.sim.conftest import sim, simulated_world\n")
    (folder / "test_inner.py").write_text(INNER_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-ra",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        str(folder),
    ]
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return result.stdout


def test_without_a_compiler_tests_are_skipped_and_counted(tmp_path):
    output = inner_pytest(tmp_path, CXX="surely-not-a-compiler")
    assert "2 skipped" in output
    assert "simulated devices need a C++20 compiler; looked for surely-not-a-compiler" in output


def test_a_race_fails_the_test_that_saw_it(simulated_world, tmp_path):
    output = inner_pytest(tmp_path)
    assert "2 passed, 1 error" in output
    assert "write-after-write" in output
