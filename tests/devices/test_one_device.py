"""Placing on a simulated Mac: one device, `mps`, which has no number, no streams and no current device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.client import PromptFailed
from devtools.hosts import HOSTS, Host
from devtools.server import Server
from tests.host.driver import spec_for
from tests.host.lifecycle import BOTH, PACKS, Keeper, own_models
from tests.host.workflows import flux, node, placed
from tests.sim import simdev

SIM = Path(simdev.__file__).parents[1]
DEVICE = "mps"
SPREAD = {"mode": "expert", "expert_mode_allocations": "mps,50%;cpu,50%"}


class Machine(Keeper):
    def allocated(self) -> int:
        return int(self.client.get("/simdev")["allocated"][DEVICE])


@pytest.fixture(scope="module", params=HOSTS, ids=lambda host: host.version)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        simdev.build(DEVICE)
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    host: Host = request.param
    base = tmp_path_factory.mktemp(f"placing-{host.version}")
    spec = spec_for(
        host,
        base,
        Path(sys.executable),
        packs={**PACKS, "simdev_probe": SIM / "probe_pack"},
        models=own_models(base),
        runner=(str(SIM / "serve.py"),),
        environment={**simdev.CPU_LIMIT, "SIMDEV": "mps:1:6g"},
        flags=simdev.HOST_FLAGS,
    )
    with Server(spec) as server:
        machine = Machine(server)
        yield machine
        assert machine.our_tracebacks() == []


@pytest.fixture
def machine(serving: Machine) -> Machine:
    serving.forget()
    return serving


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
    assert machine.draw(workflow) == stock, "the placed model was loaded already"
    machine.free(**BOTH)
    assert machine.models() == [] and machine.allocated() == 0


def test_parts_on_the_cpu_and_kept_parts(machine: Machine) -> None:
    workflow = placed(flux(seed=33), "clip", compute_device="cpu")
    workflow = placed(workflow, "model", keep_loaded="keep", **SPREAD)
    machine.draw(workflow)
    before = machine.objects()["Flux"]
    with machine.said() as lines:
        machine.free(**BOTH)
    assert machine.objects() == {"Flux": before}
    assert sum(f"cache of {DEVICE}: " in line for line in lines) == 1
    assert machine.draw(workflow) and machine.objects()["Flux"] == before


def test_a_device_that_is_not_there_is_refused_with_the_list(machine: Machine) -> None:
    with pytest.raises(PromptFailed, match=rf"cuda:0 is not on this machine, which has {DEVICE} \("):
        machine.run(placed(flux(seed=34), "model", compute_device="cuda:0"))


def test_the_report_names_it(machine: Machine) -> None:
    machine.run(placed(flux(seed=35), "model", **SPREAD))
    (text,) = machine.run({"report": node("MultiGPUMemoryReport")}).history["outputs"]["report"]["text"]
    assert f"\n{DEVICE}: " in text and f"on {DEVICE}, " in text
