"""Both halves of a step, and several seeds, on two machines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from devtools.client import Workflow
from multigpu.remote.codec import pack, unpack
from multigpu.remote.link import Message
from tests.host.workflows import flux, node, placed, sd15
from tests.packs.one_by_one_pack import one_by_one
from tests.remote.comfyui import NODE_B
from tests.remote.components.pipe import PipeLink
from tests.remote.components.studio import Studio, without_save


def halves(device: str = NODE_B) -> Workflow:
    workflow = sd15(steps=3)
    workflow["place"] = node("MultiGPUPlaceModel", model=["checkpoint", 0], compute_device=device)
    workflow["halves"] = node("MultiGPUCFGHalves", model=["checkpoint", 0], copy=["place", 0])
    workflow["sample"]["inputs"]["model"] = ["halves", 0]
    return workflow


def test_cfg_halves_equal_the_halves_one_by_one(studio: Studio) -> None:
    from comfy.patcher_extension import WrappersMP
    from nodes import common_ksampler

    workflow = without_save(sd15(steps=3))
    model, positive, negative, latent = (
        studio.run(workflow, [name, 0]) for name in ("checkpoint", "positive", "negative", "latent")
    )
    oracle = model.clone()
    oracle.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "one by one", one_by_one)
    with torch.inference_mode():
        expected = common_ksampler(oracle, 1, 3, 4.0, "euler", "simple", positive, negative, latent)[0]["samples"]
    studio.methods()
    assert torch.equal(studio.run(without_save(halves()), ["sample", 0])["samples"], expected)
    assert studio.methods().count("denoise") == 3


def test_cfg_halves_want_a_copy_on_another_machine(studio: Studio) -> None:
    workflow = halves()
    workflow["halves"]["inputs"]["copy"] = ["checkpoint", 0]
    with pytest.raises(Exception, match="the copy computes on this machine"):
        studio.run(without_save(workflow), ["sample", 0])


class Changed(PipeLink):
    """A second link to the machine of another one. With `header`, its model files are said to have that one."""

    header = ""

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        answer = super().call(method, message, timeout=timeout)
        if method != "facts" or not self.header:
            return answer
        told = unpack(answer)
        return pack({**told, "files": [[name, size, self.header] for name, size, _ in told["files"]]})


def test_a_file_that_was_replaced_is_asked_about_again(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, link = studio.remote, Changed("node-x", studio.link.worker, studio.link.check)
    monkeypatch.setattr(remote, "_files", {})
    monkeypatch.setitem(studio.cluster.links, "node-x", link)
    monkeypatch.setattr(remote, "_lines", dict(remote._lines))
    node_b, node_x = remote.line("node-b"), remote.line("node-x")
    for link.header in ("a", "another"):
        remote.agree(node_x, flux())
    for _ in range(2):
        with pytest.raises(Exception, match=r"ray://node-b is not like ray://node-x: .* another header .*\(another\)"):
            remote.agree(node_b, flux())
        with pytest.raises(Exception, match=r"ray://node-x is not like ray://node-b"):
            remote.agree(node_x, flux())
    link.header = ""
    remote.agree(node_b, flux())


def fan_out(workflow: Workflow, output: str = "decode", **inputs: Any) -> Workflow:
    return without_save(workflow) | {"fan": node("MultiGPUFanOut", value=[output, 0], **inputs)}


@pytest.mark.parametrize("machines", ["node-b", "node-b, here"])
def test_fan_out_gives_the_pictures_of_all_seeds_in_order(studio: Studio, machines: str) -> None:
    expected = torch.cat([studio.draw(flux(seed=seed)) for seed in (7, 8, 9)])
    studio.forget()
    assert torch.equal(studio.run(fan_out(flux(seed=7), count=3, machines=machines), ["fan", 0]), expected)
    assert studio.methods().count("run") == (2 if "here" in machines else 3)


def test_an_interruption_while_this_machine_has_its_share_ends_the_runs_on_the_others(studio: Studio) -> None:
    from comfy.model_management import interrupt_current_processing

    workflow = fan_out(flux(seed=30, steps=500, size=256), count=4, machines="node-b, here")
    studio.methods()
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(studio.run, workflow, ["fan", 0])
        while not (studio.link.calls and studio.link.computes()):
            assert not drawing.done(), drawing.result()
            time.sleep(0.01)
        interrupt_current_processing(True)
        with pytest.raises(Exception, match="interrupted"):
            drawing.result()
    assert torch.equal(studio.draw(placed(flux(seed=31), "model", compute_device=NODE_B)), studio.draw(flux(seed=31)))
    assert "run" not in studio.methods()


def test_fan_out_of_latents_and_of_components_placed_there(studio: Studio) -> None:
    workflow = fan_out(placed(flux(seed=3), "model", compute_device=NODE_B), "sample", count=2, machines="node-b")
    found = studio.run(workflow, ["fan", 0])["samples"]
    expected = [studio.run(without_save(flux(seed=seed)), ["sample", 0])["samples"] for seed in (3, 4)]
    assert torch.equal(found, torch.cat(expected))


REFUSED = {
    "no other machine": (lambda: fan_out(flux(), count=2, machines="here"), "names no machine for 2 seeds"),
    "no name": (lambda: fan_out(flux(), count=2, machines="node b"), "names no node"),
    "no seed": (lambda: fan_out(flux(), "latent", count=2, machines="node-b"), "nothing upstream has a seed"),
    "no batch": (lambda: fan_out(flux(), "positive", count=1, machines="here"), "only pictures, masks and latents"),
    "a component elsewhere": (
        lambda: fan_out(placed(flux(), "vae", compute_device="ray://node-c/cpu"), count=1, machines="node-b"),
        "ray://node-c/cpu is on another machine than node-b",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_fan_out_that_makes_no_sense_is_refused(studio: Studio, case: str) -> None:
    workflow, words = REFUSED[case]
    with pytest.raises(Exception, match=words):
        studio.run(workflow(), ["fan", 0])
