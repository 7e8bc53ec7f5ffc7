"""Placing on a simulated Mac: one device, `mps`, which has no number, no streams and no current device."""

from __future__ import annotations

from typing import Any

import pytest

from devtools.client import PromptFailed
from tests.devices.conftest import Machine
from tests.host import file_opens
from tests.host.lifecycle import BOTH
from tests.host.workflows import flux, node, placed

DEVICE = "mps"
linux = pytest.mark.skipif(not file_opens.AVAILABLE, reason="inotify is Linux")
SPREAD = {"mode": "expert", "expert_mode_allocations": "mps,50%;cpu,50%"}


def test_the_host_computes_on_it_and_the_widgets_offer_it(machine: Machine) -> None:
    inputs = machine.client.get("/object_info/MultiGPUPlaceModel")["MultiGPUPlaceModel"]["input"]
    offered: Any = inputs["optional"]["compute_device"]
    assert ["default", DEVICE, "cpu"] in (offered[0], offered[-1].get("options"))
    machine.draw(flux(seed=31))
    assert {row["model_class"]: row["load_device"] for row in machine.models()}["Flux"] == DEVICE


@pytest.mark.parametrize("compute", ["default", "mps", "mps:0", "gpu:0"])
def test_a_model_half_in_ram_draws_the_same(machine: Machine, compute: str) -> None:
    stock = machine.draw(flux(seed=32))
    machine.free(**BOTH)
    workflow = placed(flux(seed=32), "model", compute_device=compute, **SPREAD)
    assert machine.draw(workflow) == stock
    (row,) = (row for row in machine.models() if row["model_class"] == "Flux")
    assert row["load_device"] == DEVICE
    storages = {device.removesuffix(":0") for device in row["storages"]}
    assert storages == {DEVICE, "cpu"}
    (told,) = (model for model in machine.client.get("/multigpu/snapshot")["models"] if model["name"] == "Flux")
    assert told["compute"] == DEVICE and told["homes"].keys() == {DEVICE, "cpu"}
    assert machine.draw(workflow) == stock, "the placed model was loaded already"
    machine.free(**BOTH)
    assert machine.models() == [] and machine.allocated(DEVICE) == 0


def test_loras_come_and_go_on_a_model_half_in_ram(machine: Machine) -> None:
    strengths = (0.8, 0.3, None, 0.8)
    stock = [machine.draw(flux(seed=37, steps=3, lora=strength)) for strength in strengths]
    machine.free(**BOTH)
    for strength, picture in zip(strengths, stock, strict=True):
        source = ["lora" if strength is not None else "model", 0]
        workflow = placed(flux(seed=37, steps=3, lora=strength), "model", behind=source, **SPREAD)
        assert machine.draw(workflow) == picture
    assert len(set(stock)) == 3


@linux
@pytest.mark.parametrize("compute", ["mps", "mps:0"])
def test_a_model_that_is_placed_on_it_is_not_read_again(machine: Machine, compute: str) -> None:
    """It is where ComfyUI has loaded it for."""
    stock = machine.draw(flux(seed=36))
    with file_opens.watch(machine.server.spec.models) as opens:
        assert machine.draw(placed(flux(seed=36), "model", compute_device=compute, mode="auto")) == stock
        assert opens.take() == {}


def test_parts_on_the_cpu_and_kept_parts(machine: Machine) -> None:
    workflow = placed(flux(seed=33), "clip", compute_device="cpu")
    workflow = placed(workflow, "model", keep_loaded="keep", **SPREAD)
    machine.draw(workflow)
    before = machine.objects()["Flux"]
    with machine.said() as lines:
        machine.free(**BOTH)
    assert machine.objects() == {"Flux": before}
    assert sum(f"memory of {DEVICE}: " in line for line in lines) == 1
    assert machine.draw(workflow) and machine.objects()["Flux"] == before


def test_a_device_that_is_not_there_is_refused_with_the_list(machine: Machine) -> None:
    with pytest.raises(PromptFailed, match=rf"cuda:0 is not on this machine, which has {DEVICE} \("):
        machine.run(placed(flux(seed=34), "model", compute_device="cuda:0"))


def test_the_report_names_it(machine: Machine) -> None:
    machine.run(placed(flux(seed=35), "model", **SPREAD))
    (text,) = machine.run({"report": node("MultiGPUMemoryReport")}).history["outputs"]["report"]["text"]
    assert f"\n{DEVICE}: " in text and f"on {DEVICE}, " in text
