"""`dev.py run` shows what the README promises, on three simulated GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from devtools.places import Places


@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
def test_the_story_on_simulated_gpus() -> None:
    command = [sys.executable, "dev.py", "run", "--simulate", "3"]
    ran = subprocess.run(command, cwd=Places.here().root, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    story = ran.stdout
    assert [f"cuda:{i} Simulated" in story for i in range(3)] == [True] * 3
    assert story.count("it draws the same, bit for bit") == 3
    spread = re.search(r"by string.*\n\s+Flux\s+(.*)", story)
    assert spread is not None and all(device in spread[1] for device in ("on cuda:0", "on cuda:1", "on cpu"))
    before, freed = story.partition("Keeping and ejecting")[2].split("After ComfyUI has freed all memory:")
    for name, choice in (("Flux", "eject"), ("TAESD", "keep"), ("SD3ClipModel_", "keep")):
        assert f"{name} ({choice}) computes on cuda:0" in before
        assert (f"{name} ({choice})" in freed) is (choice == "keep")
    assert "gets clip and vae back" in freed


def test_a_wrong_number_of_simulated_gpus() -> None:
    command = [sys.executable, "dev.py", "run", "--simulate", "none"]
    ran = subprocess.run(command, cwd=Places.here().root, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "'none' is not a possible number of GPUs; give a number from 1 to 8" in ran.stderr
