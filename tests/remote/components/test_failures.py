"""A machine that is lost, an interruption, and frees: what is asked of the other machine then."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from multigpu.remote.codec import pack
from multigpu.remote.link import Message
from multigpu.units import GIB
from tests.host.workflows import flux, node, placed
from tests.remote.comfyui import NODE_B, arguments
from tests.remote.components.conftest import HOST, own_files
from tests.remote.components.pipe import PipeLink, PipeWorker
from tests.remote.components.studio import Studio, without_save

NODE_C = "ray://node-c/cpu"
VAE = "vae/toy_taef1.safetensors"


class Dying(PipeLink):
    """A link whose machine dies when a certain call is made."""

    dies_at = ""

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        if method == self.dies_at:
            self.worker.process.kill()
        return super().call(method, message, timeout=timeout)


@pytest.fixture(scope="module")
def node_c(studio: Studio, tree: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts the machine node-c, again and again. One of its files has another header than elsewhere."""
    started: list[PipeWorker] = []

    def start(dies_at: str = "") -> PipeWorker:
        folder = tmp_path_factory.mktemp("node-c")
        files = own_files(folder)
        vae = bytearray((files / VAE).read_bytes())
        vae[20] ^= 1
        (files / VAE).unlink()
        (files / VAE).write_bytes(vae)
        worker = PipeWorker(folder, tree, arguments(folder / "base", files, HOST))
        started.append(worker)
        link = Dying("node-c", worker, studio.link.check)
        link.dies_at = dies_at
        studio.cluster.links["node-c"] = link
        return worker

    yield start
    del studio.cluster.links["node-c"]
    for worker in started:
        worker.close()


def test_a_lost_machine_is_named_and_the_next_prompt_builds_again(studio: Studio, node_c: Any) -> None:
    workflow = placed(flux(), "model", compute_device=NODE_C)
    node_c(dies_at="denoise")
    with pytest.raises(Exception, match=r"RemoteDeviceLost: ray://node-c was lost during denoise of model Flux"):
        studio.draw(workflow)
    with pytest.raises(Exception, match=r"RemoteDeviceLost: ray://node-c was lost during (facts|build)"):
        studio.draw(workflow)
    node_c()
    assert torch.equal(studio.draw(workflow), studio.draw(flux()))


def test_a_file_with_another_header_than_on_another_machine_is_refused(studio: Studio, node_c: Any) -> None:
    """Of the same size, so that this machine, which opens no file, cannot see it."""
    if "node-c" not in studio.cluster.links:
        node_c()
    studio.forget()
    studio.draw(placed(flux(), "vae", compute_device=NODE_B))
    words = (
        rf"ray://node-c is not like ray://node-b: {VAE} has another header on ray://node-c \(\w+\) than on ray://node-b"
    )
    with pytest.raises(Exception, match=words):
        studio.draw(placed(flux(), "vae", compute_device=NODE_C))
    studio.cluster.links["node-c"].worker.process.kill()


def test_with_fall_back_this_machine_goes_on(
    studio: Studio, node_c: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(studio.remote, "fall_back", True)
    studio.remote._lost("node-c")
    expected = studio.draw(flux(lora=0.4, steps=3))
    node_c(dies_at="denoise")
    workflow = placed(flux(lora=0.4, steps=3), "model", behind=["lora", 0], compute_device=NODE_C)
    assert torch.equal(studio.draw(workflow), expected)
    assert re.search("ray://node-c was lost during denoise.* this machine goes on", caplog.text)
    workflow["sample"]["inputs"]["seed"] = 2
    assert torch.equal(studio.draw(workflow), studio.draw(flux(2, lora=0.4, steps=3)))
    assert re.search("ray://node-c was lost during facts.* the model is loaded on this machine", caplog.text)


def test_an_interruption_reaches_the_other_machine(studio: Studio) -> None:
    from comfy.model_management import interrupt_current_processing

    workflow = placed(flux(seed=99, steps=500, size=256), "model", compute_device=NODE_B)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            studio.draw(workflow)
        except Exception as problem:  # noqa: BLE001  looked at below
            failed.append(problem)

    thread = threading.Thread(target=run)
    studio.methods()
    thread.start()
    while not any(call.method == "denoise" for call in studio.link.calls):
        time.sleep(0.01)
    interrupt_current_processing(True)
    thread.join(60)
    assert "interrupted" in str(failed[0])
    assert torch.equal(studio.draw(placed(flux(), "model", compute_device=NODE_B)), studio.draw(flux()))


def test_a_free_unloads_there_unless_it_is_kept(studio: Studio) -> None:
    studio.forget()
    workflow = placed(flux(), "model", compute_device=NODE_B, keep_loaded="keep")
    studio.draw(workflow)
    assert studio.memory()["loaded_bytes"] > 0
    studio.free()
    assert studio.memory()["loaded_bytes"] > 0
    workflow["place_model"]["inputs"]["keep_loaded"] = "eject"
    studio.draw(workflow)
    studio.free()
    assert studio.memory() is None or studio.memory()["loaded_bytes"] == 0
    workflow["place_model"]["inputs"]["keep_loaded"] = "default"
    studio.draw(workflow)
    assert studio.memory()["loaded_bytes"] > 0
    studio.methods()
    studio.free()
    assert studio.methods().count("unload") == 1


@pytest.mark.parametrize(("keep", "stays"), [("default", False), ("keep", True)])
def test_free_memory_unloads_there_unless_it_is_kept(studio: Studio, keep: str, stays: bool) -> None:
    studio.forget()
    workflow = placed(flux(seed=71), "model", compute_device=NODE_B, keep_loaded=keep)
    workflow["free"] = node("MultiGPUFreeMemory", value=["sample", 0], free="all but pinned")
    workflow["decode"]["inputs"]["samples"] = ["free", 0]
    studio.draw(workflow)
    assert (studio.memory()["loaded_bytes"] > 0) == stays
    workflow["place_model"]["inputs"]["keep_loaded"] = "default"  # for the tests that follow
    studio.draw(workflow)


def test_the_memory_report_names_the_other_machine(studio: Studio) -> None:
    workflow = without_save(placed(flux(), "vae", compute_device=NODE_B))
    workflow["report"] = node("MultiGPUMemoryReport", value=["decode", 0])
    report = studio.run(workflow, ["report", 1])
    assert re.search(r"computes on ray://node-b/cpu: .* on ray://node-b/cpu", report), report


class Silent(PipeLink):
    """A link whose machine does not tell its memory until it may."""

    def __init__(self, link: PipeLink) -> None:
        super().__init__(link.node, link.worker, link.check)
        self.may = threading.Event()

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        if method == "memory":
            self.may.wait()
        return super().call(method, message, timeout=timeout)


def test_a_snapshot_does_not_wait_for_a_machine_that_is_silent(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    studio.forget()
    studio.draw(placed(flux(seed=41), "model", compute_device=NODE_B))
    snapshots, line = studio.remote._runtime.snapshots, studio.remote.line("node-b")
    homes = [its.resting for its in snapshots.take().models if its.device == NODE_B]
    assert homes and sum(homes[0].values()) > 0
    silent = Silent(line.link)
    with monkeypatch.context() as patch:
        patch.setattr(line, "link", silent)
        assert [its.resting for its in snapshots.take().models if its.device == NODE_B] == homes, "as last told"
        assert [its.resting for its in snapshots.take().models if its.device == NODE_B] == homes
        silent.may.set()


def test_devices_of_other_machines_are_told_with_memory_and_state(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> list[tuple[str, Any, str]]:
        monkeypatch.setattr(studio.remote, "_looked", 0.0)  # long ago
        studio.remote.labels()
        with studio.remote._looking:  # it has looked
            told = studio.remote._runtime.snapshots.take().to_json()["elsewhere"]
        return [(its["id"], its["total"], its["state"]) for its in told]

    known = studio.cluster.links.pop("node-c", None)
    assert seen() == [(NODE_B, 8 * GIB, "ready")]
    monkeypatch.setattr(studio.cluster, "lost", ["node-b"])
    assert seen() == [(NODE_B, 8 * GIB, "lost")]
    assert studio.remote.labels() == [NODE_B]
    if known is not None:
        studio.cluster.links["node-c"] = known


def test_a_call_with_an_old_handle_tells_that_the_machine_was_started_again(studio: Studio) -> None:
    answer = studio.link.call("tokenize", pack({"handle": "old", "text": "a", "word_ids": False, "options": {}}))
    assert b"gone" in answer.header
