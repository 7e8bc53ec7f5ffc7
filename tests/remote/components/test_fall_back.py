"""With fall back on, this machine computes what a lost one should have, and only in the thread that runs the prompt."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from devtools.client import Workflow
from multigpu.remote.link import Message
from tests.host.workflows import flux, placed, sd15
from tests.remote.components.pipe import PipeLink, loaded
from tests.remote.components.studio import Studio, without_save
from tests.remote.components.test_several_machines import fan_out, halves

NODE_L = "ray://node-l/cpu"


class Breaking(PipeLink):
    """A second link to the machine of another one, lost from a certain call on; the worker learns what is dropped."""

    def __init__(self, link: PipeLink, at: str) -> None:
        super().__init__("node-l", link.worker, link.check)
        self._lock = link._lock
        self._at = at
        self._broken = False

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        self._broken = self._broken or method == self._at
        if self._broken and method != "drop":
            raise loaded("errors").RemoteDeviceLost(self.node, method, "it was unplugged")
        return super().call(method, message, timeout=timeout)


@pytest.fixture
def breaking(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has the machine node-l, which is lost at a call. Fall back is on."""
    monkeypatch.setattr(studio.remote, "fall_back", True)

    def start(at: str) -> None:
        studio.cluster.links["node-l"] = Breaking(studio.link, at)

    yield start
    studio.forget()
    studio.cluster.links.pop("node-l", None)
    studio.remote._lines.pop("node-l", None)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads in which models are loaded."""
    from comfy import model_management

    names: list[str] = []
    load = model_management.load_models_gpu

    def seen(*models: Any, **more: Any) -> Any:
        names.append(threading.current_thread().name)
        return load(*models, **more)

    monkeypatch.setattr(model_management, "load_models_gpu", seen)
    return names


def seeds(first: int) -> Callable[[Studio], torch.Tensor]:
    return lambda studio: torch.cat([studio.draw(flux(seed)) for seed in (first, first + 1)])


def one(workflow: Workflow, output: str) -> Callable[[Studio], Any]:
    return lambda studio: studio.run(without_save(workflow), [output, 0])


CASES: dict[str, tuple[Workflow, str, str, Callable[[Studio], Any], str]] = {
    "CLIP": (placed(flux(61), "clip", compute_device=NODE_L), "decode", "encode_text", one(flux(61), "decode"),
             "this machine goes on without it"),
    "VAE": (placed(flux(62), "vae", compute_device=NODE_L), "decode", "vae_decode", one(flux(62), "decode"),
            "this machine goes on without it"),
    "a MODEL that is not yet there": (
        placed(flux(63), "model", compute_device=NODE_L), "decode", "build", one(flux(63), "decode"),
        "the model is loaded on this machine"),
    "halves": (halves(NODE_L), "sample", "denoise", one(halves(), "sample"), "this machine computes both halves"),
    "halves whose copy is not yet there": (
        halves(NODE_L), "sample", "facts", one(sd15(steps=3), "sample"), "CFG Halves does nothing"),
    "a run of a fan-out": (
        fan_out(flux(64), count=2, machines="node-l"), "fan", "run", seeds(64), "this machine computes its seed"),
    "a fan-out of components placed there": (
        fan_out(placed(flux(65), "model", compute_device=NODE_L), count=2, machines="here, node-l"), "fan", "facts",
        seeds(65), "this machine computes its seed"),
}  # fmt: skip
"""A workflow, its output, the call at which the machine is lost, what comes out, and what is said of it."""


@pytest.mark.parametrize("case", CASES)
def test_this_machine_computes_what_a_lost_one_should_have(
    studio: Studio, breaking: Callable[[str], None], computing: list[str], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    workflow, output, lost_at, expected, words = CASES[case]
    breaking(lost_at)
    result = studio.run(without_save(workflow), [output, 0])
    assert re.search(rf"{words}.*\(MULTIGPU_FALL_BACK\)", caplog.text)
    assert computing and not any(name.startswith("multigpu-") for name in computing)
    assert torch.equal(pixels(result), pixels(expected(studio)))


def pixels(result: Any) -> torch.Tensor:
    """Or latents."""
    found: torch.Tensor = result["samples"] if isinstance(result, dict) else result
    return found


@pytest.mark.parametrize("case", ["CLIP", "halves", "a run of a fan-out"])
def test_without_a_head_this_machine_computes_all(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """The cluster is a real one, at whose address nothing listens."""
    workflow, output, *_ = CASES[case]
    with monkeypatch.context() as patch:
        patch.setattr(studio.remote, "_cluster", loaded("remote.cluster").Cluster("127.0.0.1:9"))
        with pytest.raises(Exception, match="ClusterUnavailable: no Ray head answers at 127.0.0.1:9"):
            studio.run(without_save(workflow), [output, 0])
        patch.setattr(studio.remote, "fall_back", True)
        assert studio.run(without_save(workflow), [output, 0]) is not None
    assert re.search(r"no Ray head answers at 127.0.0.1:9.*\(MULTIGPU_FALL_BACK\)", caplog.text)
