"""Free Memory in the middle of a workflow, and what can be seen of a free."""

from __future__ import annotations

import json
import re

import pytest

from devtools.client import Workflow
from tests.host.driver import Picture
from tests.host.lifecycle import BOTH, Keeper, flux, short
from tests.host.workflows import node


def with_free(workflow: Workflow, what: str) -> Workflow:
    """Free between the sampler and the VAE, then wait, so that the state can be looked at."""
    workflow["free"] = node("MultiGPUFreeMemory", value=["sample", 0], free=what)
    workflow["after"] = node("TestWait", value=["free", 0])
    workflow["decode"]["inputs"]["samples"] = ["after", 0]
    return workflow


WHY = {
    "flagged models": "set to eject", "all but pinned": "not set to keep", "RAM caches": "no node needs it any more",
}  # fmt: skip


@pytest.mark.parametrize("what", WHY)
def test_free_memory_in_the_middle(keeper: Keeper, what: str) -> None:
    """The text encoder is gone when the VAE's turn comes: unloaded, or dropped because nothing needs it any more."""
    said = {"model": "keep", "clip": "eject" if what == "flagged models" else "default"}
    picture = keeper.draw(flux(81))
    keeper.forget()
    keeper.client.raw("/lifecycle/gate", {"open": False})
    prompt = keeper.client.submit(with_free(flux(81, **said), what))
    keeper.wait_for("/lifecycle/waiting")
    during = keeper.names()
    keeper.client.raw("/lifecycle/gate", {"open": True})
    images = keeper.client.finish(prompt).images
    assert during == ["Flux"]
    assert tuple(map(Picture.decode, images)) == picture, "the input passed through unchanged"
    assert f"Free Memory, {what}: SD3ClipModel_ unloaded ({WHY[what]}); Flux stays (set to keep)" in keeper.log()


def test_ram_comes_back_in_the_middle(keeper: Keeper) -> None:
    before = keeper.tensor_bytes()
    keeper.client.raw("/lifecycle/gate", {"open": False})
    prompt = keeper.client.submit(with_free(flux(82, model="keep"), "RAM caches"))
    keeper.wait_for("/lifecycle/waiting")
    during = keeper.tensor_bytes()
    keeper.client.raw("/lifecycle/gate", {"open": True})
    keeper.client.finish(prompt)
    assert during - before < 100 * 2**20, "the Flux is pinned; the text encoder's 247 MB are back"


def test_the_four_snapshots_and_a_line_of_json(keeper: Keeper) -> None:
    keeper.run(flux(83, model="keep", clip="eject"))
    with keeper.said() as lines:
        keeper.free(**BOTH)
    shown = [line for line in lines if "[MultiGPU] free " in line and "process" in line]
    tags = [line.partition(" at ")[0].split()[-1] for line in shown]
    assert tags == ["pre-unload", "post-unload", "post-reset", "post-gc"]
    rows = keeper.client.get("/lifecycle/history")[-4:]
    assert len({row["identifier"] for row in rows}) == 1
    assert [sorted(model["name"] for model in row["models"]) for row in rows] == [
        ["Flux", "SD3ClipModel_", "TAESD"], ["Flux", "TAESD"], ["Flux", "TAESD"], ["Flux", "TAESD"],
    ]  # fmt: skip
    assert rows[-1]["process"] < rows[0]["process"]
    with keeper.said() as lines:
        told = keeper.client.post("/lifecycle/log", {"identifier": "test", "tag": "now", "as_json": True})
    (line,) = [line for line in lines if '"identifier":"test"' in line]
    assert json.loads(line[line.index("{") :])["models"] == rows[-1]["models"]
    form = r"{} at \d\d:\d\d:\d\d: process "
    assert re.match(form.format("test now"), told["line"]) and re.match(form.format("memory asked"), told["load"])


def test_a_retained_model_that_is_missing_is_an_error(keeper: Keeper) -> None:
    keeper.run(short(84, model="keep", vae="eject"))
    keeper.client.raw("/lifecycle/sabotage", {})
    with keeper.said() as lines:
        keeper.free(**BOTH)
    (line,) = [line for line in lines if "should have stayed loaded but is gone" in line and "Flux" in line]
    assert "ERROR" in line and re.search(r"Flux \(id \d+\)", line)
