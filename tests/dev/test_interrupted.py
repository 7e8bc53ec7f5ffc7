"""Killing `dev.py` at any point leaves no process and a tree from which the next call continues."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from devtools.steps import STAMP
from tests.dev.sandbox import Sandbox, needs_proc

pytestmark = [needs_proc, pytest.mark.timeout(600)]
ANSWERS = "Devices that ComfyUI sees"
"""What is printed as soon as ComfyUI answers."""


def test_killed_while_it_installs(tmp_path: Path) -> None:
    """Half an environment is never taken for a whole one: the next call makes it anew."""
    sandbox = Sandbox(tmp_path / "clone", ready_environment=False)
    sandbox.interrupt("run", at="Installing ComfyUI", during="packages.txt", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []
    assert (sandbox.root / ".venv").is_dir() and not (sandbox.root / ".venv" / STAMP).exists()
    sandbox.interrupt("run", at="Making .venv", during="-m venv", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []


def test_killed_at_every_later_step_it_continues(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    cache = tmp_path / "cache"
    sandbox.environment["MULTIGPU_DEV_CACHE"] = str(cache)

    sandbox.interrupt("run", at="Fetching ComfyUI 0.30.0", during=" download ", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []
    assert not (sandbox.root / ".dev/hosts/0.30.0").exists()

    sandbox.interrupt("run", at="diffusion_models/toy_flux", during="devtools.toy", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []
    assert list(cache.glob("models-*")) == [], "half a folder of models looks like a whole one"

    _, output = sandbox.interrupt("run", at="Starting ComfyUI", during="main.py", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []
    assert "ComfyUI 0.30.0: ready" in output

    _, output = sandbox.interrupt("run", "--serve", at=ANSWERS, during="main.py", how=signal.SIGKILL)
    assert sandbox.wait_until_alone() == []
    assert "Tiny models: ready" in output

    code, output = sandbox.run("run")
    assert code == 0, output
    assert output.count("ready") >= 3 and "downloading" not in output and "Making" not in output
    assert "A tiny Flux draws a picture" in output
    assert sandbox.wait_until_alone() == []
    assert list(cache.rglob("*.part")) == [], "what the killed runs left is gone"


def test_stopping_a_server_is_no_error(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "clone", ready_environment=True)
    for at, how, code in ((ANSWERS, signal.SIGTERM, 143), ("ComfyUI is open at", signal.SIGINT, 130)):
        ended, output = sandbox.interrupt("run", "--serve", at=at, during="main.py", how=how)
        assert ended == code and "Traceback" not in output
        assert sandbox.wait_until_alone() == []
