"""The command as a process: its exit code and what it says when its output or its user does something unusual."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multigpu import __version__
from multigpu.cli import INTERRUPTED, READER_GONE
from tests.unit.files.model_files import flux_tensors, linear, write_safetensors

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "multigpu"]
OPTIONS = ["--devices", "cuda:0=24g@53,cpu=64g@25", "cuda:0,8gb;cpu,*"]
posix = pytest.mark.skipif(os.name != "posix", reason="pipes and devices of POSIX systems")


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Python writes in two ways, which meet a failing output at different points."""
    return {**os.environ, "PYTHONUNBUFFERED": request.param}


@pytest.fixture
def flux(tmp_path: Path) -> str:
    return str(write_safetensors(tmp_path / "flux.safetensors", flux_tensors()))


@pytest.fixture
def long_winded(tmp_path: Path) -> list[str]:
    """A command that writes more than a megabyte, which is more than a pipe takes at once."""
    tensors = {f"{'long' * 200}.{index}.weight": (8, 8) for index in range(1500)}
    return [*COMMAND, "plan", str(write_safetensors(tmp_path / "many.safetensors", tensors)), *OPTIONS, "--json"]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The finished process; of its output what was not sent elsewhere."""
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120}
    return subprocess.run(command, **usual | options)  # type: ignore[call-overload,no-any-return]


def test_the_version() -> None:
    done = run(*COMMAND, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"multigpu {__version__}\n", "")


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["doctor", "--help"]])
def test_help_goes_to_the_output(words: list[str]) -> None:
    done = run(*COMMAND, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m multigpu ")


@posix
def test_a_reader_that_has_seen_enough(long_winded: list[str], environment: dict[str, str]) -> None:
    """As in `multigpu plan ... | head -1`."""
    process = subprocess.Popen(long_winded, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"{\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == READER_GONE
    process.stderr.close()


@posix
@pytest.mark.parametrize("words", [["plan", "{flux}", *OPTIONS], ["plan", "--help"], ["--help"], ["--version"]])
def test_a_full_disk(flux: str, words: list[str], environment: dict[str, str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a system without /dev/full")
    with open("/dev/full", "w") as full:
        done = run(*COMMAND, *(word.format(flux=flux) for word in words), stdout=full, env=environment)
    name = "multigpu plan" if words[0] == "plan" else "multigpu"
    assert done.stderr == f"{name}: the result cannot be written: No space left on device\n"
    assert done.returncode == 1


@posix
def test_no_output_at_all(flux: str) -> None:
    done = run("sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "plan", flux, *OPTIONS)
    assert done.stderr == "multigpu plan: the result cannot be written: standard output is closed\n"
    assert done.returncode == 1
    assert run("sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, "plan", "none.gguf").returncode == 2


@posix
def test_an_interrupt_while_it_writes(long_winded: list[str], environment: dict[str, str]) -> None:
    """It ends although nobody reads what it had begun to write."""
    process = subprocess.Popen(long_winded, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == b"{"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED
    assert process.stderr.read() == b"multigpu plan: interrupted\n"
    process.stdout.close()
    process.stderr.close()


def test_an_interrupt_before_anything_of_the_command_is_there() -> None:
    """While Python still imports it."""
    program = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'multigpu.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('multigpu', run_name='__main__')"
    )
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"},
]


@pytest.mark.parametrize("locale", ASCII)
def test_a_terminal_that_does_not_know_the_letters(tmp_path: Path, locale: dict[str, str]) -> None:
    path = write_safetensors(tmp_path / "模型.safetensors", linear("a", 64, 64))
    done = run(*COMMAND, "plan", str(path), *OPTIONS, env=os.environ | locale)
    assert (done.returncode, done.stderr) == (0, "")
    first = done.stdout.splitlines()[0]
    assert first.isascii() and first.endswith(".safetensors: a model of an unknown family; request " + OPTIONS[-1])
    path.unlink()
    done = run(*COMMAND, "plan", str(path), *OPTIONS, env=os.environ | locale)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "cannot be read: No such file" in done.stderr


@posix
def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.safetensors"))
    try:
        write_safetensors(path, linear("a", 64, 64))
    except OSError:
        pytest.skip("a file system that only takes names in UTF-8")
    done = run(*COMMAND, "plan", str(path), *OPTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("\\udcff\\n.safetensors: ")
