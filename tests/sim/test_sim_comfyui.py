"""The real ComfyUI as a server on simulated devices draws what it draws on the CPU, and its mistakes would be seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from devtools import models
from devtools.client import Workflow
from devtools.hosts import NEWEST, Host
from devtools.places import Places
from devtools.server import Server
from tests.host import workflows
from tests.host.driver import Driver, Picture, spec_for
from tests.sim import simdev

KIND = os.environ.get("SIMDEV", "cuda").split(":")[0]
ZERO, ONE = f"{KIND}:0", f"{KIND}:1"
HERE = Path(__file__).parent
GiB = 1024**3
MODEL_BYTES = 38_800_000
"""Of the tiny Flux's weights, a little less than there are."""

only_with_streams = pytest.mark.skipif(KIND != "cuda", reason="ComfyUI offloads weights on an NPU without streams")


def fp8() -> Workflow:
    workflow = workflows.flux()
    workflow["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    return workflow


def gguf() -> Workflow:
    workflow = workflows.flux()
    workflow["model"] = workflows.node("SimdevLoadQuantised", unet_name="toy_flux.safetensors")
    return workflow


def on_device_one() -> Workflow:
    workflow = workflows.flux()
    workflow["select"] = workflows.node("SelectModelDevice", model=["model", 0], device="gpu:1")
    workflow["sample"]["inputs"]["model"] = ["select", 0]
    return workflow


def one_at_a_time() -> Workflow:
    workflow = workflows.sd15(steps=1)
    workflow["each"] = workflows.node("SimdevOneAtATime", model=["checkpoint", 0])
    workflow["sample"]["inputs"]["model"] = ["each", 0]
    return workflow


def split() -> Workflow:
    workflow = workflows.sd15(steps=1)
    workflow["split"] = workflows.node("MultiGPU_WorkUnits", model=["checkpoint", 0], max_gpus=2)
    workflow["sample"]["inputs"]["model"] = ["split", 0]
    return workflow


STOCK: dict[str, Callable[[], Workflow]] = {
    "flux": workflows.flux,
    "sd15": lambda: workflows.sd15(steps=1),
    "wan": workflows.wan,
    "lora": lambda: workflows.flux(lora=1.0),
    "fp8": fp8,
    "gguf": gguf,
}
REFERENCE = STOCK | {"one at a time": one_at_a_time}


@dataclass(frozen=True)
class Drawn:
    """What a workflow made: the latent as sampled, bit for bit, and the pictures."""

    latent: torch.Tensor
    pictures: tuple[Picture, ...]

    def equals(self, other: Drawn) -> bool:
        return torch.equal(self.latent, other.latent) and self.pictures == other.pictures


class Machine(Driver):
    """A ComfyUI server with the probe pack, on simulated devices or (`simulated=False`) on the CPU."""

    def draw_all(self, workflow: Workflow) -> Drawn:
        keep = workflows.node("SaveLatent", samples=["sample", 0], filename_prefix="kept")
        pictures = self.draw(workflow | {"keep": keep})
        folder = self.server.spec.base / "output"
        newest = max(folder.glob("kept_*.latent"), key=lambda path: path.name)
        return Drawn(load_file(newest)["latent_tensor"], pictures)

    def state(self) -> dict[str, Any]:
        return dict(self.client.get("/simdev"))

    def change(self, **wanted: Any) -> None:
        self.client.post("/simdev", wanted)


@contextmanager
def serve(host: Host, base: Path, *, simulated: bool) -> Iterator[Machine]:
    for needed in (Places.here().host_tree(host.version), models.folder(Places.here())):
        if not needed.is_dir():
            pytest.fail(f"{needed} is not there; `python dev.py test --only sim` makes it")
    changes: dict[str, Any] = {"packs": {"simdev_probe": HERE / "probe_pack"}, "environment": simdev.CPU_LIMIT}
    if simulated:
        changes["runner"] = (str(HERE / "serve.py"),)
        changes["environment"] = {**simdev.CPU_LIMIT, "SIMDEV": f"{KIND}:3:6g"}
    changes["flags"] = simdev.HOST_FLAGS if simulated else (*simdev.HOST_FLAGS, "--cpu")
    with Server(spec_for(host, base, Path(sys.executable), **changes)) as server:
        yield Machine(server)


@pytest.fixture(scope="module", params=[NEWEST], ids=lambda host: host.version)
def host(request: pytest.FixtureRequest) -> Host:
    try:
        simdev.build(KIND)  # here rather than in the server, which has a time limit to answer
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    row: Host = request.param
    return row


@pytest.fixture(scope="module")
def reference(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[dict[str, Drawn]]]:
    """The stock workflows on the CPU, with number types as on a GPU; drawn while the simulated machine starts."""
    base = tmp_path_factory.mktemp("cpu")

    def draw() -> dict[str, Drawn]:
        with serve(host, base, simulated=False) as machine:
            return {name: machine.draw_all(make()) for name, make in REFERENCE.items()}

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(draw)


@pytest.fixture
def expected(reference: Future[dict[str, Drawn]]) -> dict[str, Drawn]:
    return reference.result()


@pytest.fixture(scope="module")
def shared(
    host: Host, reference: Future[dict[str, Drawn]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    with serve(host, tmp_path_factory.mktemp(KIND), simulated=True) as machine:
        yield machine


@pytest.fixture
def machine(shared: Machine) -> Iterator[Machine]:
    """The server with fresh counters. A race that the test did not expect fails it."""
    shared.change(reset=True, sabotage=None)
    yield shared
    races = shared.state()["races"]
    assert not races, f"{len(races)} races, the first: {races[0]['message']}"


def test_the_host_sees_three_devices(machine: Machine) -> None:
    devices = machine.client.get("/system_stats")["devices"]
    assert [(device["type"], device["index"], device["vram_total"]) for device in devices] == [
        (KIND, index, 6 * GiB) for index in range(3)
    ]


@pytest.mark.parametrize("name", STOCK)
def test_draws_what_the_cpu_draws(machine: Machine, expected: dict[str, Drawn], name: str) -> None:
    assert machine.draw_all(STOCK[name]()).equals(expected[name])
    state = machine.state()
    assert state["operations"] > 1000
    assert state["peak"][ZERO] > 2e7
    assert state["peak"][ONE] == 0


def test_free_gives_the_memory_back(machine: Machine) -> None:
    machine.run(workflows.flux())
    assert machine.state()["allocated"][ZERO] > MODEL_BYTES
    machine.free(unload_models=True, free_memory=True)
    assert set(machine.state()["allocated"].values()) == {0}


def test_select_model_device(machine: Machine, expected: dict[str, Drawn]) -> None:
    assert machine.draw_all(on_device_one()).equals(expected["flux"])
    state = machine.state()
    assert state["allocated"][ONE] > MODEL_BYTES
    assert state["moved"][f"cpu > {ONE}"] > MODEL_BYTES


def test_the_cfg_split_uses_two_devices_from_two_threads(machine: Machine, expected: dict[str, Drawn]) -> None:
    assert machine.draw_all(split()).equals(expected["one at a time"])
    state = machine.state()
    assert state["peak"][ZERO] > 8e7
    assert state["peak"][ONE] > 8e7
    assert state["moved"][f"{ONE} > {ZERO}"] > 0


def test_static_offload_at_low_capacity(machine: Machine, expected: dict[str, Drawn]) -> None:
    """With 1 GiB ComfyUI keeps no weight on the device: every step uploads all of them."""
    machine.free(unload_models=True, free_memory=True)
    machine.change(reset=True, limit={ZERO: GiB})
    assert machine.draw_all(workflows.flux()).equals(expected["flux"])
    state = machine.state()
    assert state["moved"][f"cpu > {ZERO}"] > 2 * MODEL_BYTES
    assert (state["pinned_bytes"] > 0) == (KIND == "cuda")


@only_with_streams
def test_a_removed_wait_in_the_host_is_seen(machine: Machine, expected: dict[str, Drawn]) -> None:
    machine.free(unload_models=True, free_memory=True)
    machine.change(limit={ZERO: GiB}, sabotage="compute does not wait for copies")
    assert not machine.draw_all(workflows.flux()).equals(expected["flux"])
    races = machine.state()["races"]
    assert len(races) > 50
    assert races[0]["kind"] == "read-after-write"
    machine.change(sabotage=None, reset=True)


@only_with_streams
def test_a_buffer_that_the_host_reuses_too_early_is_seen(machine: Machine, expected: dict[str, Drawn]) -> None:
    """The numbers stay right, because simulated compute is never late: only the detector knows."""
    machine.free(unload_models=True)
    machine.change(limit={ZERO: GiB})
    machine.run(workflows.flux(seed=2))  # makes the host's offload streams
    machine.change(sabotage="copies do not wait for compute")
    assert machine.draw_all(workflows.flux(seed=3)).pictures
    assert "write-after-read" in {race["kind"] for race in machine.state()["races"]}
    machine.change(sabotage=None, reset=True)
