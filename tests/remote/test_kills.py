"""A worker's process, its node and the head of the cluster, killed during every kind of call of a real workflow."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from devtools import models
from devtools.client import Workflow
from devtools.hosts import NEWEST
from devtools.places import Places
from devtools.server import Server
from multigpu.remote.cluster import Relay, start_worker
from tests.host.driver import Driver
from tests.host.workflows import flux, node
from tests.remote.comfyui import NODE_B, arguments, driver_spec, remote
from tests.remote.conftest import ECHO, NOWHERE
from tests.remote.held import HOLD, Hold
from tests.remote.processes import Descendants, below, until

SEEDS = itertools.count(100)


def encoding_pixels(seed: int) -> Workflow:
    """A picture that is encoded before it is decoded again, both there."""
    workflow = remote(seed)
    workflow["again"] = node("VAEEncode", pixels=["decode", 0], vae=["place_vae", 0])
    workflow["decoded"] = node("VAEDecode", samples=["again", 0], vae=["place_vae", 0])
    workflow["save"]["inputs"]["images"] = ["decoded", 0]
    return workflow


def in_tiles(seed: int) -> Workflow:
    """The same in tiles."""
    workflow = encoding_pixels(seed)
    tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
    for name in ("again", "decoded"):
        workflow[name]["class_type"] += "Tiled"
        workflow[name]["inputs"] |= tiles
    return workflow


def fanned_out(seed: int) -> Workflow:
    """The whole workflow on the other machine."""
    workflow = flux(seed)
    workflow["fan"] = node("MultiGPUFanOut", value=["decode", 0], count=1, machines="node-b")
    workflow["save"]["inputs"]["images"] = ["fan", 0]
    return workflow


CALLS: dict[str, Callable[[int], Workflow]] = {
    "facts": remote, "build": remote, "tokenize": remote, "encode_text": remote, "conditions": remote,
    "denoise": remote, "vae_decode": remote, "vae_encode": encoding_pixels, "vae_decode_tiled": in_tiles,
    "vae_encode_tiled": in_tiles, "unload": remote, "run": fanned_out,
}  # fmt: skip
"""Every call that a workflow of ours, or a free after it, makes, and one that makes it."""
PARTS = {"denoise": "model", "conditions": "model", "tokenize": "clip", "encode_text": "clip"}
"""The components that the calls are for, besides those of the VAE."""
KILLS = {
    "actor": ("build", "encode_text", "denoise", "vae_decode", "vae_encode", "unload", "run"),
    "node": ("denoise",),
    "head": ("vae_decode",),
}
"""What is killed, and during which calls. Below the component, every call is only bytes, so that which one it is makes
no difference to a lost node or head, whose start takes long. With MULTIGPU_TEST_KILLS=all, each is killed in each."""
if os.environ.get("MULTIGPU_TEST_KILLS") == "all":
    KILLS = dict.fromkeys(KILLS, tuple(CALLS))


class Machines:
    """The head, node-a, has no ComfyUI; node-b has one whose calls can be held."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.5", 0)) as free:
            self.head = f"127.0.0.5:{free.getsockname()[1]}"
        self._arguments = arguments(folder, models.folder(Places.here()))
        self._running: dict[str, Relay] = {}

    def start(self) -> None:
        """Those that do not run."""
        if "node-a" not in self._running:
            self._running["node-a"] = start_worker("node-a", self.head, NOWHERE, [], head_here=True, service=ECHO)
        if "node-b" not in self._running:
            tree = Places.here().host_tree(NEWEST.version)
            self._running["node-b"] = start_worker(
                "node-b", self.head, tree, self._arguments, head_here=False, service="tests.remote.held:start"
            )

    def kill(self, what: str) -> None:
        node_b = self._running["node-b"]
        if what == "actor":
            below(node_b.process, "ray::Worker").kill()
        elif what == "node":
            below(node_b.process, "raylet/raylet").kill()
        else:
            below(self._running["node-a"].process, "gcs_server").kill()

    def tidy(self, killed: str) -> None:
        """Wait for what ends by itself after that was killed: everything that cannot be used any more."""
        for name in {"actor": (), "node": ("node-b",), "head": ("node-b", "node-a")}[killed]:
            self._running[name].wait()
            self._running.pop(name).close()

    def stop(self) -> None:
        for relay in reversed(self._running.values()):
            relay.close()


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hold]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLD, str(tmp_path_factory.mktemp("hold") / "call"))
        yield Hold()


@pytest.fixture(scope="module")
def machines(hold: Hold, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    started = Descendants()
    machines = Machines(tmp_path_factory.mktemp("node-b"))
    try:
        yield machines
    finally:
        machines.stop()
    assert started.left() == []


@pytest.fixture(scope="module")
def comfy(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Server(driver_spec(tmp_path_factory.mktemp("here"), machines.head)) as server:
        yield Driver(server)


def draws(comfy: Driver, workflow: Workflow) -> object:
    """Its pictures, once the cluster has noticed what has come back; until then it fails with a reason."""
    drawn: list[object] = []

    def works() -> bool:
        try:
            drawn.append(comfy.draw(workflow))
        except Exception as error:  # noqa: BLE001  the driver's own, about a prompt that failed
            assert re.search("RemoteDeviceLost|ClusterUnavailable", str(error)), error
        return bool(drawn)

    assert until(works)
    return drawn[0]


@pytest.mark.parametrize(("killed", "call"), [(what, call) for what, calls in KILLS.items() for call in calls])
def test_a_kill_is_told_with_its_call_and_the_next_prompt_draws(
    comfy: Driver, machines: Machines, hold: Hold, killed: str, call: str
) -> None:
    machines.start()
    seed = next(SEEDS)
    workflow = CALLS[call](seed)
    hold.ask(call)
    with ThreadPoolExecutor(1) as pool:
        try:
            drawing = pool.submit(frees if call == "unload" else draws_until, comfy, workflow, hold)
            assert until(lambda: hold.reached() or drawing.done())
            assert hold.reached(), drawing.result()
            machines.kill(killed)
            hold.release()
            told = drawing.result()
        finally:
            hold.release()
    start = "was not unloaded" if call == "unload" else "RemoteDeviceLost"
    assert re.search(rf"{start}: ray://node-b was lost during {call}\b", told), told
    if call not in ("facts", "build", "run", "unload"):
        assert f"{call} of {PARTS.get(call, 'vae')} " in told
    machines.tidy(killed)
    machines.start()
    assert draws(comfy, workflow) == comfy.draw(local_of(call, seed))


def local_of(call: str, seed: int) -> Workflow:
    """The same workflow with everything on this machine."""
    workflow = CALLS[call](seed)
    if call == "run":
        return flux(seed)
    for part in ("model", "clip", "vae"):
        workflow[f"place_{part}"]["inputs"]["compute_device"] = NODE_B.rpartition("/")[2]
    return workflow


def draws_until(comfy: Driver, workflow: Workflow, hold: Hold) -> str:
    """What the prompt says in which the held call is lost. Prompts before it may find the machine not yet back."""
    while True:
        try:
            comfy.draw(workflow)
        except Exception as error:  # noqa: BLE001  the driver's own, about a prompt that failed
            if hold.reached():
                return str(error)
        else:
            raise AssertionError("the prompt has drawn its picture without the held call")


def frees(comfy: Driver, workflow: Workflow, hold: Hold) -> str:
    """What is logged of the free after a picture, in which the held call is lost."""
    draws(comfy, workflow)
    before = len(comfy.log())
    comfy.client.free(unload_models=True)
    assert until(lambda: "was not unloaded" in comfy.log()[before:])
    return comfy.log()[before:]
