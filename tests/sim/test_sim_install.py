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
        ("tpu:3:6g", "cannot simulate 'tpu': use one of cuda, xpu, npu, mps"),
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


CUDA_BUILD = """
import torch
from tests.sim import simdev

def real(*arguments, **options):
    raise RuntimeError("a real kernel was called")

kernels = torch.library.Library("aten", "IMPL")
for name in ("empty.memory_format", "copy_", "mm", "add.out", "_foreach_add_.Scalar", "silu_backward"):
    kernels.impl(name, real, "CUDA")
torch.version.cuda = "13.0"
world = simdev.install("KIND", 1)
a = torch.eye(3).to(world.device(0))
torch._foreach_add_([a], 1)
assert (a @ a + a).cpu().tolist() == [[8.0 if i == j else 6.0 for i in range(3)] for j in range(3)]
assert torch.ops.aten.silu_backward(a, a).device == a.device
assert world.operations()["aten::mm.out"] == 1  # as where torch has no kernels for CUDA
print(torch.version.cuda)
"""


def test_real_kernels_and_the_version_of_a_cuda_build(simulated_world):
    """Such a build has kernels for CUDA before anything is simulated, and says for which CUDA it was built."""
    result = subprocess.run(
        [sys.executable, "-c", CUDA_BUILD.replace("KIND", KIND)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    said = {"cuda": "13.0", "xpu": "None", "npu": "None"}
    assert (result.stdout.strip(), result.returncode) == (said[KIND], 0), result.stderr


def test_without_a_compiler_the_start_up_module_says_so():
    command = [sys.executable, "tests/sim/serve.py", "tests/gpu/check_semantics.py"]
    missing = os.environ | {"SIMDEV": KIND, "CXX": "surely-not-a-compiler"}
    result = subprocess.run(command, cwd=ROOT, env=missing, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1
    assert "Install g++ or set CXX to a compiler." in result.stderr and "Traceback" not in result.stderr


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
