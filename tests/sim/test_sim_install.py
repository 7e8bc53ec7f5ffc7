"""Installing: once, checked, and the same script agrees with the simulation that asks real GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import simdev

ROOT = Path(__file__).parent.parent.parent
KIND = os.environ.get("SIMDEV", "cuda").split(":")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu:3:6g", "cannot simulate 'tpu': use one of cuda, npu"),
        ("cuda:many", "cannot read 'cuda:many'.*write for example cuda:3:6g"),
        ("cuda:3:6", "size '6' must end in m or g"),
        ("cuda:3:1g,2g", "2 capacities for 3 devices: give one number, or one for each device"),
    ],
)
def test_bad_descriptions(text, message):
    with pytest.raises(ValueError, match=message):
        simdev.install_from_text(text)


def test_a_process_has_one_simulation(sim):
    with pytest.raises(RuntimeError, match=f"this process already simulates {KIND}: start another process"):
        simdev.install("cuda")
    assert simdev.current() is sim


def test_a_capacity_for_each_device(simulated_world):
    code = (
        "from tests.sim import simdev; import torch;"
        f"w = simdev.install_from_text('{KIND}:2:1.5g,512m');"
        f"print([torch.get_device_module('{KIND}').mem_get_info(d)[1] for d in w.devices])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.stdout.strip() == str([3 * 1024**3 // 2, 512 * 1024**2])


def test_the_start_up_module_explains_itself():
    command = [sys.executable, "tests/sim/serve.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "usage: SIMDEV=cuda:3:6g" in result.stderr


@pytest.mark.skipif(KIND != "cuda", reason="the script for real GPUs speaks CUDA")
def test_the_script_for_real_gpus_agrees_with_the_simulation(simulated_world, tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, "tests/sim/serve.py", "tests/gpu/check_semantics.py", str(results)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"SIMDEV": "cuda"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(results.read_text())
    assert len(report["checks"]) >= 17
    assert all(row["agrees"] for row in report["checks"])
