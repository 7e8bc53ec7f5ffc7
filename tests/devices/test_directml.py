"""Placing with ComfyUI's `--directml`, simulated: devices without streams, a current device or a known size of memory.

ComfyUI takes 1 GiB for the free memory of such a device, so it unloads a model as soon as the next one is loaded.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from devtools.client import Workflow
from tests.devices.conftest import Machine
from tests.host.driver import Picture
from tests.host.lifecycle import BOTH, flux, short
from tests.host.workflows import node
from tests.unit.files.model_files import flux_tensors, write_safetensors

ZERO, ONE = "directml:0", "directml:1"
TORCH_ZERO, TORCH_ONE = "privateuseone:0", "privateuseone:1"


@pytest.fixture(scope="module")
def large(serving: Machine) -> str:
    """A Flux of real width with fewer blocks: 1.4 GB, more than ComfyUI assumes to be free. All weights are zero."""
    tensors = flux_tensors(doubles=1, singles=2)
    tensors |= {name.replace("query", "key"): shape for name, shape in tensors.items() if "query" in name}
    return write_safetensors(serving.server.spec.models / "diffusion_models" / "large.safetensors", tensors).name


@pytest.mark.parametrize(
    ("widgets", "homes"),
    [
        ({"mode": "auto"}, [ZERO]),
        ({"mode": "expert", "expert_mode_allocations": "directml:0,1.2gb;cpu,*"}, [ZERO, "cpu"]),
        ({"mode": "expert", "expert_mode_allocations": "directml:1,1.2gb;directml:0,*"}, [ZERO, ONE]),
        ({"mode": "virtual VRAM", "virtual_vram_gb": 1.2, "donor_device": "directml:1,cpu"}, [ZERO, ONE]),
    ],
)
def test_a_plan_may_use_more_than_comfyui_assumes(
    machine: Machine, large: str, widgets: dict[str, Any], homes: list[str]
) -> None:
    asked = {"node": "MultiGPUPlaceModel", "inputs": widgets, "files": [large], "folder": "diffusion_models"}
    plan = machine.client.post("/multigpu/plan", asked)["plan"]
    assert [*plan["homes"]] == homes
    assert max(plan["homes"].values()) > 1 << 30


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("auto,3gb", "3.00 GiB of directml:0 are to stay free, but that device does not tell how much it has"),
        ("0.5", "a share of the memory of directml:0, but that device does not tell how much it has"),
    ],
)
def test_what_needs_the_size_of_the_memory_is_refused(machine: Machine, large: str, text: str, problem: str) -> None:
    inputs = {"mode": "expert", "expert_mode_allocations": text}
    asked = {"node": "MultiGPUPlaceModel", "inputs": inputs, "files": [large], "folder": "diffusion_models"}
    assert problem in machine.client.post("/multigpu/plan", asked)["error"]["message"]


def test_another_device_holds_more_than_comfyui_assumes(machine: Machine, large: str) -> None:
    workflow = short(44, model="default")
    workflow["model"]["inputs"]["unet_name"] = large
    widgets = {"mode": "expert", "expert_mode_allocations": "directml:1,1.2gb;directml:0,*"}
    workflow["place_model"]["inputs"] |= widgets
    workflow["report"] = node("MultiGPUMemoryReport", value=["sample", 0])
    for name in ("vae", "decode", "save"):
        del workflow[name]
    (text,) = machine.run(workflow).history["outputs"]["report"]["text"]
    (row,) = machine.models()
    assert row["storages"].keys() <= {TORCH_ZERO, TORCH_ONE}, text
    assert machine.allocated(TORCH_ONE) > 1 << 30


def spread(
    seed: int, text: str, compute: str = "default", keep: str = "default", lora: float | None = None
) -> Workflow:
    """The Flux workflow with its model spread, and a Memory Report while that is loaded."""
    workflow = flux(seed, lora=lora, after="MultiGPUMemoryReport", model=keep)
    widgets = {"compute_device": compute, "mode": "expert", "expert_mode_allocations": text}
    workflow["place_model"]["inputs"] |= widgets
    return workflow


@pytest.mark.parametrize(
    ("compute", "text", "computes", "homes"),
    [
        ("default", "directml:0,50%;cpu,50%", ZERO, {ZERO, "cpu"}),
        ("directml:1", "directml:0,30%;directml:1,40%;cpu,*", ONE, {ZERO, ONE, "cpu"}),
        ("gpu:1", "directml,50%;gpu:1,50%", ONE, {ZERO, ONE}),
    ],
)
def test_a_spread_model_draws_the_same(
    machine: Machine, compute: str, text: str, computes: str, homes: set[str]
) -> None:
    stock = machine.run(flux(seed=41))
    machine.free(**BOTH)
    ours = machine.run(spread(41, text, compute))
    assert [Picture.decode(file) for file in ours.images] == [Picture.decode(file) for file in stock.images]
    (report,) = ours.history["outputs"]["after"]["text"]
    found = re.search(r"^- Flux \(default\) computes on (\S+): ([^;]+)", report, re.MULTILINE)
    assert found is not None, report
    assert found[1] == computes and {part.rpartition(" on ")[2] for part in found[2].split(", ")} == homes
    machine.free(**BOTH)
    assert machine.models() == [] and machine.allocated(TORCH_ZERO) == machine.allocated(TORCH_ONE) == 0


def test_loras_come_and_go(machine: Machine) -> None:
    strengths = (0.8, 0.3, None)
    stock = [machine.draw(flux(seed=43, lora=strength)) for strength in strengths]
    machine.free(**BOTH)
    for strength, picture in zip(strengths, stock, strict=True):
        assert machine.draw(spread(43, "directml:0,30%;directml:1,40%;cpu,*", lora=strength)) == picture
    assert len(set(stock)) == 3


def test_a_kept_model_stays(machine: Machine) -> None:
    machine.run(spread(42, "directml:0,50%;cpu,50%", keep="keep"))
    machine.free(**BOTH)
    assert machine.held() == ["Flux"]
