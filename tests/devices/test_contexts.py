"""Who only looks uses no GPU that ComfyUI does not use: on CUDA, that would take hundreds of megabytes on each."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.devices.conftest import Machine
from tests.devices.test_lifecycle import ONE, TWO, ZERO
from tests.host.lifecycle import FILES, short
from tests.host.workflows import node

PLACE = {"node": "MultiGPUPlaceModel", "files": [FILES["model"].partition("/")[2]], "folder": "diffusion_models"}
EXPERT = {"compute_device": ZERO, "mode": "expert", "expert_mode_allocations": f"{ZERO},50%;cpu,*"}


async def listened(address: str) -> dict[str, Any]:
    """The first snapshot that a client is sent."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws?clientId=looks") as socket:
        async with session.post(f"{address}/multigpu/listen", json={"client": "looks"}) as answer:
            assert answer.status == 200
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT and (told := message.json())["type"] == "multigpu.snapshot":
                return dict(told["data"])
    raise AssertionError("the socket was closed")


def told(snapshot: dict[str, Any]) -> dict[str, tuple[bool, bool, bool]]:
    """Of the other GPUs: whether their memory is told, whether they are in use, and whether it is told how much is."""
    return {
        its["id"]: (its["total"] == 6 * 1024**3, its["in_use"], its["used"] is not None)
        for its in snapshot["devices"][1:-1]
    }


def placed(seed: int, **widgets: Any) -> dict[str, Any]:
    workflow = short(seed, model="default")
    (place,) = [its for its in workflow.values() if its["class_type"] == "MultiGPUPlaceModel"]
    place["inputs"] |= widgets
    return workflow


def test_who_looks_makes_no_context(machine: Machine) -> None:
    """ComfyUI's own `/system_stats` uses all of them, and so do its frees; `machine` takes that back first."""

    def contexts() -> list[str]:
        """Besides that on the device which ComfyUI chooses."""
        return [device for device in machine.state()["contexts"] if device != ZERO]

    client = machine.client
    assert contexts() == []
    info = client.get("/object_info")
    assert info["MultiGPUPlaceModel"]["input"]["optional"]["compute_device"][1]["options"][1:4] == [ZERO, ONE, TWO]
    unused = dict.fromkeys((ONE, TWO), (True, False, False))
    assert told(client.get("/multigpu/snapshot")) == told(asyncio.run(listened(client.address))) == unused
    for widgets in ({}, EXPERT, {"compute_device": ONE}, EXPERT | {"compute_device": TWO}):
        assert client.post("/multigpu/plan", PLACE | {"inputs": widgets})["plan"]["homes"]
    report = machine.run({"report": node("MultiGPUMemoryReport")}).history["outputs"]["report"]["text"]
    assert f"{ONE}: 6.00 GiB, not in use by ComfyUI" in "\n".join(report).splitlines()
    assert contexts() == []
    machine.run(placed(301, **EXPERT))
    assert contexts() == [], "a plan for a run asks the devices that it may use"
    machine.run(placed(302, compute_device=ONE, mode="expert", expert_mode_allocations=f"{ONE},50%;cpu,*"))
    assert contexts() == [ONE]
    assert told(client.get("/multigpu/snapshot")) == unused | {ONE: (True, True, True)}
    machine.run(placed(303, compute_device=ZERO, mode="auto"))
    assert contexts() == [ONE, TWO], "auto may use all of them"
