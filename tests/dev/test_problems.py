"""What people meet on a machine that is not ready: one sentence that says what to do, and exit code 2."""

from __future__ import annotations

import ast
import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import problem
from devtools.guard import BASE_PYTHON
from devtools.places import Places
from tests.dev.sandbox import Sandbox, assert_one_sentence, needs_mount

DEV = Places.here().root / "dev.py"


@pytest.mark.parametrize("version", [(2, 7), (3, 10), (3, 14)])
def test_the_wrong_python(version: tuple[int, int]) -> None:
    pretend = f"import runpy, sys; sys.version_info = {(*version, 0, 'final', 0)}; sys.argv = ['dev.py', 'run']; "
    command = [sys.executable, "-c", pretend + f"runpy.run_path({str(DEV)!r}, run_name='__main__')"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_sentence(
        result.returncode, result.stderr, "needs Python 3.11, 3.12 or 3.13", f"{version[0]}.{version[1]}"
    )


def test_an_old_python_can_read_the_file_that_tells_it_so() -> None:
    ast.parse(DEV.read_text(encoding="utf-8"), feature_version=(3, 4))


def test_what_runs_without_an_environment_needs_the_standard_library_only() -> None:
    program = f"import sys; sys.path.insert(0, {str(DEV.parent)!r}); import devtools.cli"
    result = subprocess.run([BASE_PYTHON, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = Sandbox(tmp_path, ready_environment=True).run("run", "--port", str(port))
    assert_one_sentence(code, output, f"Port {port}", "--port")


def test_an_unknown_host_version(tmp_path: Path) -> None:
    code, output = Sandbox(tmp_path, ready_environment=True).run("run", "--host", "0.1.2")
    assert_one_sentence(code, output, "0.1.2", "0.24.1, 0.30.0")


def test_no_network(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    sandbox.go_offline()
    sandbox.environment["MULTIGPU_DEV_CACHE"] = str(tmp_path / "cache")
    code, output = sandbox.run("run")
    assert_one_sentence(code, output, "could not be reached", "check the network")
    code, output = sandbox.run("doctor")
    assert code == 2 and "does not reach the package index" in output


@needs_mount
def test_a_disk_that_is_too_small_is_noticed_before_anything_is_downloaded(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "clone", ready_environment=False)
    code, output = sandbox.run_mounted("run", mount=sandbox.root, options="size=64m")
    assert_one_sentence(code, output, "0.1 GB", "free some space")
    assert "Making" not in output


@needs_mount
def test_a_disk_that_fills_up_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    sandbox.environment["MULTIGPU_DEV_CACHE"] = str(tmp_path / "cache")
    code, output = sandbox.run_mounted("run", mount=tmp_path / "cache", options="size=100m")
    assert_one_sentence(code, output, "is full", "run the same command again")


@needs_mount
def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Another folder helps, another clone would not."""
    (tmp_path / "cache").mkdir()
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    for cache in (tmp_path / "cache", tmp_path / "cache" / "not" / "there"):
        sandbox.environment["MULTIGPU_DEV_CACHE"] = str(cache)
        code, output = sandbox.run_mounted("run", mount=tmp_path / "cache", options="ro")
        assert_one_sentence(code, output, str(cache), "Read-only file system", "set MULTIGPU_DEV_CACHE to a folder")
        code, output = sandbox.run_mounted("doctor", mount=tmp_path / "cache", options="ro")
        assert code == 2 and "set MULTIGPU_DEV_CACHE to a folder" in output, output


@pytest.mark.parametrize("below", ["", "/folder", "/folder/in/folder"])
def test_a_cache_folder_that_is_a_file_or_below_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    sandbox.environment["MULTIGPU_DEV_CACHE"] = f"{tmp_path}/file{below}"
    code, output = sandbox.run("run")
    assert_one_sentence(code, output, f"{tmp_path}/file{below}", "set MULTIGPU_DEV_CACHE to a folder")
    code, output = sandbox.run("doctor")
    assert code == 2 and "set MULTIGPU_DEV_CACHE to a folder" in output, output


@needs_mount
def test_a_clone_that_cannot_be_written(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    code, output = sandbox.run_mounted("run", mount=sandbox.root, options="ro")
    assert_one_sentence(code, output, str(sandbox.root), "clone into a folder of your own")
    code, output = sandbox.run_mounted("doctor", mount=sandbox.root, options="ro")
    assert code == 2 and "clone into a folder of your own" in output and "Ready" not in output, output


def test_an_expression_that_matches_no_test(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, ready_environment=True)
    code, output = sandbox.run("test", "--only", "unit", "-k", "surely_no_such_test")
    assert_one_sentence(code, output, "No test of unit matches -k 'surely_no_such_test'")
    code, output = sandbox.run("test", "--only", "unit", "-k", "test_decimals_are_exact")
    assert code == 0, output


def test_doctor_on_a_ready_machine() -> None:
    result = subprocess.run([sys.executable, DEV, "doctor"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Ready: python dev.py run" in result.stdout


PIP_SAYS = [
    ("ERROR: Could not install packages: [Errno 28] No space left on device", "is full"),
    (
        "NewConnectionError('...: Failed to establish a new connection')\nERROR: No matching distribution",
        "check the network",
    ),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "report it"),
    ("error: subprocess-exited-with-error\n\nsomething else went wrong\n", "something else went wrong"),
]


@pytest.mark.parametrize(("text", "part"), PIP_SAYS)
def test_what_pip_says_becomes_a_sentence(text: str, part: str) -> None:
    assert part in str(problem.from_output(text, "torch", Path("there")))


def test_only_errors_of_the_machine_become_sentences() -> None:
    assert "is full" in str(problem.from_os_error(OSError(errno.ENOSPC, "full", "there")))
    assert "cannot be written" in str(problem.from_os_error(OSError(errno.EACCES, "no", "there")))
    assert problem.from_os_error(OSError(errno.ENOENT, "missing", "there")) is None
