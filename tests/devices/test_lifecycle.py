"""Keeping and ejecting on three simulated devices: what stays where, and that the memory is really free again."""

from __future__ import annotations

import re

import pytest

from devtools.client import PromptFailed, Workflow
from multigpu.units import format_bytes
from tests.devices.conftest import KIND, Machine
from tests.host.lifecycle import BOTH, FILES, flux, short
from tests.host.workflows import node

ZERO, ONE, TWO = (f"{KIND}:{index}" for index in range(3))
MODEL_BYTES, CLIP_BYTES = 38_000_000, 240_000_000
"""A little less than the weights of the two models."""


def on_devices(seed: int, **wanted: tuple[str, str]) -> Workflow:
    """The Flux workflow with parts placed: on_devices(1, model=("cuda:1", "keep"))."""
    workflow = flux(seed, **{part: said for part, (_, said) in wanted.items()})
    for part, (device, _) in wanted.items():
        workflow[f"place_{part}"]["inputs"]["compute_device"] = device
    return workflow


def given_back(device: str, count: int) -> str:
    """What the log says when all that the allocator had reserved was given back."""
    return f"memory of {device}: {format_bytes(count)} reserved before, 0 B after, {format_bytes(count)} given back"


def test_pinned_on_one_device_survives_and_flagged_on_another_leaves(machine: Machine) -> None:
    workflow = on_devices(91, model=(ONE, "keep"), clip=(TWO, "eject"))
    picture = machine.draw(workflow)
    before = machine.objects()
    assert {row["model_class"]: row["load_device"] for row in machine.models()} == {
        "Flux": ONE, "SD3ClipModel_": TWO, "TAESD": ZERO,
    }  # fmt: skip
    assert machine.allocated(ONE) > MODEL_BYTES and machine.allocated(TWO) > CLIP_BYTES
    reserved = machine.state()["reserved"][TWO]
    with machine.said() as lines:
        machine.free(**BOTH)
    assert [sum(f"memory of {device}: " in line for line in lines) for device in (ZERO, ONE, TWO)] == [1, 1, 1]
    assert sum(given_back(TWO, reserved) in line for line in lines) == 1
    assert machine.client.get("/multigpu/history")["frees"][0]["returned"][TWO] == reserved
    after = machine.objects()
    assert after == {name: before[name] for name in ("Flux", "TAESD")}
    assert machine.allocated(ONE) > MODEL_BYTES
    assert machine.allocated(TWO) == 0
    assert set(machine.state()["reserved"].values()) == set(machine.state()["allocated"].values()), "no cache is left"
    assert machine.draw(workflow) == picture
    assert machine.objects()["Flux"] == before["Flux"]


def test_what_leaves_in_the_middle_of_a_workflow_is_given_back(machine: Machine) -> None:
    workflow = on_devices(106, clip=(TWO, "eject"))
    workflow["after"] = node("MultiGPUFreeMemory", value=["sample", 0], free="flagged models")
    workflow["decode"]["inputs"]["samples"] = ["after", 0]
    with machine.said() as lines:
        machine.run(workflow)
    (line,) = (line for line in lines if f"Free Memory: memory of {TWO}: " in line)
    reserved = re.search(r": (\S+ MiB) reserved before, 0 B after, \1 given back$", line)
    assert reserved is not None and float(reserved[1].partition(" ")[0]) * 2**20 > CLIP_BYTES, line


def test_what_is_placed_without_a_choice_is_freed_on_every_device_and_the_cpu(machine: Machine) -> None:
    workflow = on_devices(94, model=(ONE, "default"), clip=("cpu", "default"))
    machine.draw(workflow)
    assert {row["model_class"]: row["load_device"] for row in machine.models()} == {
        "Flux": ONE, "SD3ClipModel_": "cpu", "TAESD": ZERO,
    }  # fmt: skip
    machine.client.post("/simdev", {"cache": 1 << 20})
    cached = machine.state()["reserved"][TWO]
    with machine.said() as lines:
        machine.free(unload_models=True)
    assert machine.objects() == {}, "ComfyUI's own unload leaves models on the CPU"
    assert [tag for _, tag in machine.tags()[-4:]] == ["pre-unload", "post-unload", "post-reset", "post-gc"]
    (words,) = (line for line in lines if "(nothing is set to keep)" in line)
    assert all(name in words for name in ("Flux", "SD3ClipModel_", "TAESD"))
    for device in (ZERO, ONE, TWO):
        assert sum(f"memory of {device}: " in line and "given back" in line for line in lines) == 1
    assert cached > 0 and sum(given_back(TWO, cached) in line for line in lines) == 1
    assert machine.draw(flux(95)) and machine.objects()
    with machine.said() as lines:
        machine.free(unload_models=True)
    assert not [line for line in lines if "MultiGPU" in line], "a workflow without our nodes is ComfyUI's alone"


@pytest.mark.parametrize("dropped", ["by the next prompt", "by a full device"])
def test_a_free_covers_the_device_of_a_placed_model_that_was_dropped_before(machine: Machine, dropped: str) -> None:
    """No choice was made since the last free, and no placed model is loaded; but its device may have bytes cached."""
    if dropped == "by the next prompt":
        workflow = short(100)
        workflow["model"] = node("UNETLoaderMultiGPU", **workflow["model"]["inputs"], device=ONE)
        machine.run(workflow)
        machine.free(unload_models=True)
        workflow["sample"]["inputs"]["seed"] = 101
        assert "model" in machine.run(workflow).cached_nodes, "its node does not run, and the model is loaded again"
        machine.run(short(101, after="TestRelease"))
    else:
        workflow = short(100, model="default", after="TestExhaust")
        workflow["place_model"]["inputs"]["compute_device"] = ONE
        with pytest.raises(PromptFailed, match="on purpose"):
            machine.run(workflow)
    machine.collect()
    assert ONE not in {row["load_device"] for row in machine.models()} and machine.held() == []
    machine.client.post("/simdev", {"cache": 1 << 20})
    with machine.said() as lines:
        machine.free(unload_models=True)
    assert [sum(f"memory of {device}: " in line for line in lines) for device in (ZERO, ONE, TWO)] == [1, 1, 1]
    state = machine.state()
    assert state["reserved"] == state["allocated"], "no cache is left"
    machine.run(short(102))
    with machine.said() as lines:
        machine.free(unload_models=True)
    assert not [line for line in lines if "MultiGPU" in line], "the next free is ComfyUI's alone again"


def test_a_model_spread_over_devices_stays_and_leaves_whole(machine: Machine) -> None:
    """A placed model with weights on two donors: pinned it stays as it is placed, ejected it leaves all devices."""
    stock = machine.draw(flux(92))
    machine.free(**BOTH)
    workflow = flux(92, model="keep")
    widgets = workflow["place_model"]["inputs"]
    widgets |= {"compute_device": ZERO, "mode": "expert"}
    widgets["expert_mode_allocations"] = f"{ZERO},30%;{ONE},40%;cpu,30%"
    assert machine.draw(workflow) == stock
    before = machine.objects()["Flux"]
    share = machine.allocated(ONE)
    assert share > 0.3 * MODEL_BYTES
    machine.free(**BOTH)
    assert machine.objects() == {"Flux": before}
    assert machine.allocated(ONE) == share
    assert machine.draw(workflow) == stock
    widgets["keep_loaded"] = "eject"
    machine.run(workflow)
    machine.free(**BOTH)
    machine.free(**BOTH)
    machine.collect()
    state = machine.state()
    assert set(state["allocated"].values()) == {0}
    assert state["pinned_bytes"] == 0, "no pinned page is left"
    assert machine.models() == []


def test_loras_come_and_go_on_a_model_spread_over_devices(machine: Machine) -> None:
    strengths = (0.8, 0.3, None, 0.8)
    stock = [machine.draw(flux(93, lora=strength)) for strength in strengths]
    machine.free(**BOTH)
    spread = {"mode": "expert", "expert_mode_allocations": f"{ZERO},30%;{ONE},40%;cpu,30%"}
    for strength, picture in zip(strengths, stock, strict=True):
        workflow = flux(93, lora=strength, model="default")
        workflow["place_model"]["inputs"] |= {"compute_device": ZERO, **spread}
        assert machine.draw(workflow) == picture
    assert len(set(stock)) == 3


def test_a_kept_model_may_be_moved_to_ram_when_another_needs_the_memory(machine: Machine) -> None:
    """Keep concerns frees. While models are loaded ComfyUI makes room as always; the kept object outlives that."""
    workflow = short(97, model="keep")
    workflow["place_model"]["inputs"]["compute_device"] = ONE
    picture = machine.draw(workflow)
    before = machine.objects()["Flux"]
    machine.client.post("/simdev", {"limit": {ONE: 512 << 20}})  # ComfyUI leaves more than that free to compute in
    text = on_devices(98, clip=(ONE, "default"))
    machine.run(
        {name: text[name] for name in ("clip", "place_clip", "positive")}
        | {"show": node("PreviewAny", source=["positive", 0])}
    )
    assert "Flux" not in machine.objects() and "Flux" in machine.held()
    machine.client.post("/simdev", {"limit": {ONE: 6 << 30}})
    with machine.said() as lines:
        machine.free(**BOTH)
    assert "Flux" in machine.held()
    words = "SD3ClipModel_ unloaded (not set to keep); Flux stays (set to keep, in RAM)"
    assert sum(words in line for line in lines) == 1
    assert machine.draw(workflow) == picture and machine.objects()["Flux"] == before


def test_the_report_says_where_a_spread_model_rests(machine: Machine) -> None:
    """What the debug pack counts on each device, and each device's memory with its cache."""
    workflow = flux(95, model="keep")
    spread = {"compute_device": ZERO, "mode": "expert", "expert_mode_allocations": f"{ZERO},30%;{ONE},40%;cpu,30%"}
    workflow["place_model"]["inputs"] |= spread
    workflow["report"] = node("MultiGPUMemoryReport", value=["sample", 0])
    (text,) = machine.run(workflow).history["outputs"]["report"]["text"]
    (row,) = [row for row in machine.models() if row["model_class"] == "Flux"]
    resting = {device: format_bytes(count) for device, count in row["storages"].items()}
    assert resting.keys() == {ZERO, ONE, "cpu"}
    places = ", ".join(f"{resting[device]} on {device}" for device in (ZERO, "cpu", ONE))
    lines = text.splitlines()
    (its,) = [line for line in lines if line.startswith("- Flux (keep) ")]
    assert its.startswith(f"- Flux (keep) computes on {ZERO}: {places}; step ")
    devices = [line for line in lines if line.startswith(f"{KIND}:")]
    assert [line.partition(": ")[0] for line in devices] == [ZERO, ONE, TWO]
    if KIND == "cuda":  # which tells whether it is in use
        assert devices.pop() == f"{TWO}: 6.00 GiB, not in use by ComfyUI"
    assert all(" of 6.00 GiB used, " in line and line.endswith(" cached by the allocator") for line in devices)


def test_the_panel_shows_a_spread_model_where_it_is(machine: Machine) -> None:
    """Its blocks by home are what the storages have, within one block; so is the plan that was made before."""
    text = f"{ZERO},30%;{ONE},40%;cpu,30%"
    spread = {"compute_device": ZERO, "mode": "expert", "expert_mode_allocations": text}
    name = FILES["model"].partition("/")[2]
    asked = {"node": "MultiGPUPlaceModel", "inputs": spread, "files": [name], "folder": "diffusion_models"}
    plan = machine.client.post("/multigpu/plan", asked)["plan"]
    workflow = flux(99, model="keep")
    workflow["place_model"]["inputs"] |= spread
    machine.run(workflow)
    told = machine.client.get("/multigpu/snapshot")
    counted = {row["model_class"]: row["storages"] for row in machine.models()}
    models = {model["name"]: model for model in told["models"]}
    assert {its: model["homes"] for its, model in models.items()} == counted
    model = models["Flux"]
    assert model["placed"] and model["compute"] == ZERO and model["file"] == name and model["used"] <= told["time"]
    assert plan["compute"] == ZERO and plan["ring"] > 0 and plan["step"] is not None
    for blocks in (model["blocks"], plan["blocks"]):
        largest = max(size for _, size, *_ in blocks)
        for home, count in counted["Flux"].items():
            assert abs(sum(size for _, size, where, _ in blocks if where == home) - count) <= largest, home
    streamed = [size for _, size, home, reason in model["blocks"] if home != ZERO and reason == "streamed"]
    assert model["streamed"] == sum(streamed) > 0 and model["ring"] >= max(streamed)
    assert plan["step"]["forecast"] > 0 and plan["step"]["measured"] is None
    assert model["step"]["forecast"] > 0 and model["step"]["measured"] is None, "one step is too few to measure"
    devices = {device["id"]: device for device in told["devices"]}
    assert [*devices] == [ZERO, ONE, TWO, "cpu"]
    on_one = sum(storages.get(ONE, 0) for storages in counted.values())
    assert devices[ONE]["ours"] == on_one and devices[ONE]["total"] == 6 << 30
    assert devices[ONE]["used"] == devices[ONE]["ours"] + devices[ONE]["others"]
    assert devices[ZERO]["ours"] == sum(storages.get(ZERO, 0) for storages in counted.values()) + model["ring"]
    machine.client.post("/multigpu/eject", {"model": model["id"]})
    machine.wait_idle()
    assert "Flux" not in {its["name"] for its in machine.client.get("/multigpu/snapshot")["models"]}
    assert machine.client.get("/multigpu/history")["frees"][0]["returned"][ONE] >= on_one
    assert machine.allocated(ONE) == 0


def test_the_caches_of_all_devices_are_cleared(machine: Machine) -> None:
    machine.run(on_devices(96, model=(ONE, "keep"), clip=(TWO, "keep")))
    for _ in range(3):  # the host may empty caches too, once, up to ten seconds after a prompt
        machine.client.post("/simdev", {"cache": 1 << 20})
        held = machine.state()
        if all(held["reserved"][device] > held["allocated"][device] for device in (ZERO, ONE, TWO)):
            break
    else:
        pytest.fail("the devices do not keep freed memory in their caches")
    with machine.said() as lines:
        told = machine.client.post("/lifecycle/soft_empty", {})
    own = [line for line in lines if "soft_empty_cache_multigpu: memory of " in line]
    assert [device in line for device, line in zip((ZERO, ONE, TWO), own, strict=True)] == [True] * 3
    cleared = machine.state()
    assert cleared["reserved"] == cleared["allocated"]
    assert told == {device: count - cleared["reserved"][device] for device, count in held["reserved"].items()}
    assert cleared["allocated"][ONE] == held["allocated"][ONE], "what is in use stays"


def test_a_model_on_the_cpu_leaves_too(machine: Machine) -> None:
    """The host's own unload looks at accelerators alone."""
    machine.run(on_devices(94, vae=("cpu", "eject"), model=(ZERO, "keep")))
    assert {row["model_class"]: row["entry_device"] for row in machine.models()}["TAESD"] == "cpu"
    machine.free(unload_models=True)
    assert machine.names() == ["Flux", "SD3ClipModel_"]
