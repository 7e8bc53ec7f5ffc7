"""A worker started by its command, a ComfyUI that knows its cluster, and workflows over both."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from devtools import models
from devtools.client import Workflow
from devtools.hosts import NEWEST
from devtools.places import Places
from devtools.server import Server
from multigpu.remote.cluster import Cluster
from multigpu.remote.codec import pack, unpack
from tests.browser.conftest import TAB, browser
from tests.host.driver import Driver
from tests.host.workflows import flux, node, placed, sd15
from tests.remote.comfyui import NODE_B, arguments, driver_spec, remote
from tests.remote.processes import Descendants, below, until

__all__ = ["browser"]  # a fixture
Process = subprocess.Popen[bytes]


@contextmanager
def worker_command(name: str, head: str, base: Path, *options: str) -> Iterator[Process]:
    """`multigpu worker`, ready. It leaves nothing behind."""
    places = Places.here()
    command = [sys.executable, "-m", "multigpu", "worker", f"--name={name}", f"--head={head}", *options]
    command += ["--comfyui", str(places.host_tree(NEWEST.version)), "--", *arguments(base, models.folder(places))]
    started = Descendants()
    process = subprocess.Popen(command, cwd=places.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().decode() for _ in range(3)]
        assert said[1] == f"{name} is ready. It offers\n" and said[2].startswith(f"  ray://{name}/cpu "), said
        yield process
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert started.left() == []


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Process]]:
    """node-b, with the address of its head, which it is itself."""
    with socket.create_server(("127.0.0.4", 0)) as free:
        head = f"127.0.0.4:{free.getsockname()[1]}"
    with worker_command("node-b", head, tmp_path_factory.mktemp("node-b"), "--head-here") as process:
        yield head, process


@pytest.fixture(scope="module")
def comfy(worker: tuple[str, Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Server(driver_spec(tmp_path_factory.mktemp("here"), worker[0], in_file=True)) as server:
        yield Driver(server)


def rich() -> Workflow:
    """Flux with a LoRA and another sampling; what it has decoded is encoded and decoded again, in tiles."""
    workflow = flux(1, lora=0.7, size=160)
    sizes = {"max_shift": 1.5, "base_shift": 0.7, "width": 512, "height": 512}
    workflow["sampling"] = node("ModelSamplingFlux", model=["lora", 0], **sizes)
    workflow["sample"]["inputs"]["model"] = ["sampling", 0]
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    workflow["encode"] = node("VAEEncodeTiled", pixels=["decode", 0], vae=["vae", 0], **tiles)
    workflow["decode_again"] = node("VAEDecodeTiled", samples=["encode", 0], vae=["vae", 0], **tiles)
    workflow["save"]["inputs"]["images"] = ["decode_again", 0]
    return workflow


def test_the_worker_draws_what_is_drawn_here(comfy: Driver) -> None:
    """Also with what is before the place nodes, and in tiles."""
    assert comfy.draw(remote(1)) == comfy.draw(flux(1))
    there = placed(rich(), "model", behind=["sampling", 0], compute_device=NODE_B)
    for part in ("clip", "vae"):
        there = placed(there, part, compute_device=NODE_B)
    assert comfy.draw(there) == comfy.draw(rich())


def halves(name: str) -> Workflow:
    """SD1.5, the negative half of whose steps is computed by this machine's copy of the model."""
    workflow = sd15(steps=3)
    workflow["copy"] = node("MultiGPUPlaceModel", model=["checkpoint", 0], compute_device=f"ray://{name}/cpu")
    workflow["halves"] = node("MultiGPUCFGHalves", model=["checkpoint", 0], copy=["copy", 0])
    workflow["sample"]["inputs"]["model"] = ["halves", 0]
    return workflow


def halves_here() -> Workflow:
    """The same with both halves on this machine, one after the other."""
    workflow = sd15(steps=3)
    workflow["halves"] = node("TestOneByOne", model=["checkpoint", 0])
    workflow["sample"]["inputs"]["model"] = ["halves", 0]
    return workflow


def test_three_machines_draw_the_seeds_of_a_fan_out_and_either_has_a_half_of_the_steps(
    comfy: Driver, worker: tuple[str, Process], tmp_path: Path
) -> None:
    """This one, node-b and node-c: each draws some seeds; then the negative half is left to one of the two others."""
    fanned = flux(7)
    fanned["fan"] = node("MultiGPUFanOut", value=["decode", 0], count=5, machines="node-b, here, node-c")
    fanned["save"]["inputs"]["images"] = ["fan", 0]
    with worker_command("node-c", worker[0], tmp_path):
        drawn, *halved = (comfy.draw(workflow) for workflow in (fanned, halves("node-b"), halves("node-c")))
    assert drawn == tuple(picture for seed in range(7, 12) for picture in comfy.draw(flux(seed)))
    assert halved == 2 * [comfy.draw(halves_here())]


def test_a_model_on_another_machine_is_seen_pinned_and_ejected_here(comfy: Driver) -> None:
    """By the panel's routes: where its bytes are, keep through a free, and eject."""
    comfy.draw(remote(1))

    def snapshot() -> Any:
        return comfy.client.get("/multigpu/snapshot")

    def bytes_there(name: str) -> int:
        models = {model["name"]: model for model in snapshot()["models"]}
        return sum(models.get(name, {"homes": {}})["homes"].values())

    def node_b() -> Any:
        return next((its for its in snapshot()["elsewhere"] if its["id"] == NODE_B), None)

    assert until(node_b)
    sent = {"node": "MultiGPUPlaceModel", "inputs": {"compute_device": NODE_B}}
    assert comfy.client.post("/multigpu/plan", sent) == {"plan": None, "elsewhere": "node-b"}, "it plans there"
    there = node_b()
    assert there["state"] == "ready"
    assert there["total"] == psutil.virtual_memory().total and there["ours"] > 0
    widget = comfy.client.get("/object_info/MultiGPUPlaceModel")["MultiGPUPlaceModel"]["input"]["optional"]
    assert NODE_B in widget["compute_device"][1]["options"]
    assert "ray://" in widget["compute_device"][1]["tooltip"]
    ids = {model["name"]: model["id"] for model in snapshot()["models"] if NODE_B in model["homes"]}
    model = next(name for name in ids if "Flux" in name)
    comfy.client.post("/multigpu/pin", {"model": ids[model]})
    comfy.free(unload_models=True)
    assert bytes_there(model) > 0
    comfy.client.post("/multigpu/eject", {"model": ids[model]})
    comfy.wait_idle()
    assert until(lambda: model not in {each["name"] for each in snapshot()["models"]})


def test_the_panel_shows_the_devices_of_other_machines(comfy: Driver, browser: Any) -> None:
    comfy.draw(remote(2))
    page = browser.new_page()
    page.goto(comfy.client.address, wait_until="domcontentloaded", timeout=120_000)
    page.locator(TAB).click(timeout=120_000)
    bar = page.locator(f".multigpu-device[data-device='{NODE_B}']")
    bar.get_by_text("ready", exact=True).wait_for(timeout=60_000)
    bar.locator(".multigpu-segment").first.wait_for(timeout=60_000)
    page.close()


def test_no_port_of_the_worker_answers_http_requests(worker: tuple[str, Process]) -> None:
    """ComfyUI's own server is not there, nor is Ray's dashboard. The ports are Ray's, which asks for the token."""
    tree = psutil.Process(worker[1].pid).children(recursive=True)
    (dashboard,) = (each.cmdline() for each in tree if "dashboard/dashboard.py" in " ".join(each.cmdline()))
    assert {"--disable-frontend", "--modules-to-load=UsageStatsHead"} <= {*dashboard}, "that is how Ray leaves it out"
    sockets = [its for each in tree for its in each.net_connections("inet") if its.status == psutil.CONN_LISTEN]
    assert len(sockets) > 2
    for ip, port in (each.laddr for each in sockets):
        with socket.create_connection((ip.strip(":") or "127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /system_stats HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.settimeout(5)
            assert not connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_next_prompt_builds_again_what_a_killed_worker_had(comfy: Driver, worker: tuple[str, Process]) -> None:
    tree = psutil.Process(worker[1].pid).children(recursive=True)
    actor = next(each for each in tree if "ray::Worker" in " ".join(each.cmdline()))
    actor.kill()
    assert until(lambda: draws(comfy, remote(2)))
    assert comfy.draw(remote(2)) == comfy.draw(flux(2))


def draws(comfy: Driver, workflow: Workflow) -> bool:
    """Whether it draws the workflow, for which it may have to notice first that something was lost."""
    try:
        comfy.draw(workflow)
    except Exception as error:  # noqa: BLE001  the driver's own, about a prompt that failed
        assert "RemoteDeviceLost" in str(error)
        return False
    return True


def test_the_worker_forgets_what_it_has_for_a_relay_or_a_comfyui_that_was_killed(
    comfy: Driver, worker: tuple[str, Process]
) -> None:
    cluster = Cluster(worker[0])

    def handles() -> Any:
        return unpack(cluster.link("node-b").call("memory", pack({})))["handles"]

    try:
        for seed, killed in ((3, "multigpu.remote.relay"), (4, "main.py")):
            assert until(partial(draws, comfy, remote(seed)))
            assert len(handles()) == 3
            assert cluster.nodes()[0].versions.keys() == {"ComfyUI", "MultiGPU", "torch", "Ray", "Python"}
            assert comfy.server._child is not None
            below(comfy.server._child.pid, killed).kill()
            assert until(lambda: not handles())
    finally:
        cluster.close()
