"""Components on another machine draw what local ones draw, and are computed there."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from devtools.client import Workflow
from multigpu import __version__
from tests.host import file_opens
from tests.host.workflows import flux, node, placed, sd15, wan
from tests.remote.comfyui import NODE_B
from tests.remote.components.conftest import HOST
from tests.remote.components.pipe import loaded
from tests.remote.components.studio import Studio, without_save


def checkpoint(part: str, **widgets: Any) -> Workflow:
    """SD1.5 with one part of its checkpoint on the other machine."""
    return placed(sd15(), part, behind=["checkpoint", ["model", "clip", "vae"].index(part)], **widgets)


def with_sampling(workflow: Workflow, class_type: str, **inputs: Any) -> Workflow:
    """The workflow with a node that changes the model, such as its sampling, just before the sampler."""
    source = workflow["sample"]["inputs"]["model"]
    workflow["sampling"] = node(class_type, model=source, **inputs)
    workflow["sample"]["inputs"]["model"] = ["sampling", 0]
    return workflow


DOWNSCALE = {
    "block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0, "downscale_after_skip": True,
    "downscale_method": "bicubic", "upscale_method": "bicubic",
}  # fmt: skip
"""For a node that puts functions into the blocks of a U-Net, by transformer options."""

CASES = {
    "CLIP": (flux(), lambda: placed(flux(), "clip", compute_device=NODE_B), "encode_text"),
    "VAE": (flux(), lambda: placed(flux(), "vae", compute_device=NODE_B), "vae_decode"),
    "MODEL with a negative prompt": (sd15(), lambda: checkpoint("model", compute_device=NODE_B), "denoise"),
    "MODEL with a LoRA": (
        flux(lora=0.7),
        lambda: placed(flux(lora=0.7), "model", behind=["lora", 0], compute_device=NODE_B),
        "denoise",
    ),
    "MODEL with other sampling": (
        with_sampling(flux(), "ModelSamplingFlux", max_shift=1.5, base_shift=0.7, width=512, height=512),
        lambda: placed(
            with_sampling(flux(), "ModelSamplingFlux", max_shift=1.5, base_shift=0.7, width=512, height=512),
            "model", behind=["sampling", 0], compute_device=NODE_B,
        ),
        "denoise",
    ),
    "MODEL with other sampling of a node's own class": (
        with_sampling(sd15(), "ModelSamplingDiscrete", sampling="lcm", zsnr=False),
        lambda: placed(
            with_sampling(sd15(), "ModelSamplingDiscrete", sampling="lcm", zsnr=False),
            "model", behind=["sampling", 0], compute_device=NODE_B,
        ),
        "denoise",
    ),
    "MODEL, its sampling changed here": (
        with_sampling(sd15(), "ModelSamplingDiscrete", sampling="v_prediction", zsnr=True),
        lambda: with_sampling(
            checkpoint("model", compute_device=NODE_B), "ModelSamplingDiscrete", sampling="v_prediction", zsnr=True
        ),
        "denoise",
    ),
    "MODEL with functions in its blocks": (
        with_sampling(sd15(), "PatchModelAddDownscale", **DOWNSCALE),
        lambda: placed(
            with_sampling(sd15(), "PatchModelAddDownscale", **DOWNSCALE),
            "model", behind=["sampling", 0], compute_device=NODE_B,
        ),
        "denoise",
    ),
    "MODEL with a ControlNet here": (
        sd15(control=0.8),
        lambda: placed(sd15(control=0.8), "model", behind=["checkpoint", 0], compute_device=NODE_B),
        "denoise",
    ),
    "video MODEL": (wan(), lambda: placed(wan(), "model", compute_device=NODE_B), "denoise"),
    "video VAE": (wan(), lambda: placed(wan(), "vae", compute_device=NODE_B), "vae_decode"),
    "everything": (
        flux(),
        lambda: placed(
            placed(placed(flux(), "clip", compute_device=NODE_B), "vae", compute_device=NODE_B), "model",
            compute_device="ray://node-b/default",
        ),
        "denoise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pixels_equal_those_of_a_local_component(studio: Studio, case: str) -> None:
    local, remote, method = CASES[case]
    expected = studio.draw(local)
    studio.methods()
    assert torch.equal(studio.draw(remote()), expected)
    small(studio)
    assert method in studio.methods()


def test_functions_in_blocks_change_pixels(studio: Studio) -> None:
    """So that the case above says something."""
    assert not torch.equal(studio.draw(CASES["MODEL with functions in its blocks"][0]), studio.draw(sd15()))


def test_the_versions_that_are_compared_are_those_of_what_runs(studio: Studio) -> None:
    from importlib.metadata import version

    found = studio.service.versions()
    assert found == {
        "ComfyUI": HOST.version, "MultiGPU": __version__, "torch": torch.__version__, "Ray": version("ray")
    }  # fmt: skip
    assert "ray" not in sys.modules


def small(studio: Studio) -> None:
    """All calls since `methods` were at most their tensors and 4 KiB, there and back."""
    assert studio.link.calls
    assert {call.method: call.beside_tensors for call in studio.link.calls if call.beside_tensors > 4096} == {}


def tiled(workflow: Workflow, vae: list[Any]) -> Workflow:
    """Encodes what it has decoded and decodes that, both in tiles."""
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    workflow["encode"] = node("VAEEncodeTiled", pixels=["decode", 0], vae=vae, **tiles)
    workflow["whole"] = node("VAEEncode", pixels=["decode", 0], vae=vae)
    workflow["tiled"] = node("VAEDecodeTiled", samples=["encode", 0], vae=vae, **tiles)
    return workflow


@pytest.mark.parametrize("make", [flux, wan])
def test_a_remote_vae_encodes_and_works_in_tiles(studio: Studio, make: Any) -> None:
    local = tiled(make(size=160), ["vae", 0])
    remote = placed(local, "vae", compute_device=NODE_B)
    studio.methods()
    for output in ("whole", "encode"):
        one, other = (studio.run(without_save(each), [output, 0])["samples"] for each in (local, remote))
        assert torch.equal(one, other)
    one, other = (studio.run(without_save(each), ["tiled", 0]) for each in (local, remote))
    assert torch.equal(one, other)
    small(studio)


def test_a_second_run_computes_nothing_and_a_change_upstream_does(studio: Studio) -> None:
    workflow = placed(flux(lora=0.5), "model", behind=["lora", 0], compute_device=NODE_B)
    studio.draw(workflow)
    studio.methods()
    studio.draw(workflow)
    assert studio.methods() == []
    workflow["lora"]["inputs"]["strength_model"] = 0.25
    changed = studio.draw(workflow)
    assert "build" in studio.methods()
    assert torch.equal(changed, studio.draw(flux(lora=0.25)))


def test_this_machine_opens_no_file_of_a_remote_component(studio: Studio) -> None:
    studio.forget()
    with file_opens.watch(studio.models) as opened:
        studio.draw(placed(placed(flux(lora=0.3), "clip", compute_device=NODE_B), "model", behind=["lora", 0],
                           compute_device=NODE_B))  # fmt: skip
        assert set(opened.take()) == {"vae/toy_taef1.safetensors"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [flux, sd15])
def test_conditioning_is_sent_once(studio: Studio, make: Any, dtype: torch.dtype) -> None:
    """By the call that asks what the model makes of it, or by none if the model has had it before.

    Steps refer to it, also where the host has put two texts into one batch, or has converted them for the model.
    """
    from nodes import common_ksampler

    part = ["model", 0] if make is flux else ["checkpoint", 0]
    workflow = without_save(placed(make(), "model", behind=part, compute_device=NODE_B))
    model, text, latent = (studio.run(workflow, [name, 0]) for name in ("place_model", "positive", "latent"))
    noise = torch.rand_like(text[0][0])
    positive, negative = ([[(text[0][0] + part * noise).to(dtype), text[0][1]]] for part in (1, 2))

    def sample(seed: int) -> list[Any]:
        """The calls of a prompt."""
        studio.methods()
        with torch.inference_mode():
            common_ksampler(model, seed, 4, 1.0 if make is flux else 4.0, "euler", "simple", positive, negative, latent)
        return [*studio.link.calls]

    pooled = text[0][1]["pooled_output"]
    most = 2 * latent["samples"].nbytes + (0 if pooled is None else pooled.nbytes) + 4096
    first = sample(5)
    texts = [call.there for call in first if call.method == "conditions"]
    assert len(texts) == 2 and all(positive[0][0].nbytes < there < positive[0][0].nbytes + most for there in texts)
    assert all(call.back < most for call in first)
    assert [call.there < most for call in first if call.method == "denoise"] == [True] * 4
    assert all(call.there < most for call in sample(6))


def test_handles_are_living_proxies(studio: Studio) -> None:
    studio.forget()
    component = studio.run(without_save(placed(flux(), "vae", compute_device=NODE_B)), ["place_vae", 0])
    assert len(studio.handles()) == 1
    clones = [component.patcher.clone() for _ in range(3)]
    assert len(studio.handles()) == 1
    del component, clones
    studio.forget()
    assert studio.handles() == []


def test_clones_of_a_proxy_are_real_components(studio: Studio) -> None:
    import comfy.model_base
    import comfy.sd

    workflow = without_save(placed(placed(flux(), "model", compute_device=NODE_B), "clip", compute_device=NODE_B))
    model, clip = studio.run(workflow, ["place_model", 0]), studio.run(workflow, ["place_clip", 0])
    assert isinstance(model.model, comfy.model_base.Flux)
    assert isinstance(clip.clone(), comfy.sd.CLIP)
    assert model.model.model_config.unet_config["guidance_embed"]
    assert sum(weight.nbytes for weight in model.model.state_dict().values()) < 2**17


REFUSED = {
    "a LoRA behind the place node": (
        lambda: _lora_behind(),
        "put the node before the place node",
    ),
    "functions in blocks, added behind the place node": (
        lambda: with_sampling(checkpoint("model", compute_device=NODE_B), "PatchModelAddDownscale", **DOWNSCALE),
        r"function .*at \['options'\]\['patches'\].* put the node that adds it before the place node",
    ),
    "a ControlNet alone": (
        lambda: _control_net(),
        "place the model and its ControlNet on the same machine",
    ),
    "a donor on another machine": (
        lambda: placed(flux(), "model", compute_device=NODE_B, mode="virtual VRAM", donor_device="ray://node-c/cpu"),
        "than where it computes",
    ),
    "an allocation that the other machine does not understand": (
        lambda: placed(flux(), "model", compute_device=NODE_B, mode="expert", expert_mode_allocations="cpu,1%;cpu,*"),
        "ray://node-b, build: .*cpu is named twice",
    ),
    "a name without device": (lambda: placed(flux(), "model", compute_device="ray://node-b"), "names no device"),
    "a device that is not there": (
        lambda: placed(flux(), "model", compute_device="ray://node-b/cuda:7"),
        "cuda:7",
    ),
}  # fmt: skip


def _lora_behind() -> Workflow:
    workflow = placed(flux(), "model", compute_device=NODE_B)
    name = "toy_flux_lora.safetensors"
    workflow["behind"] = node("LoraLoaderModelOnly", model=["place_model", 0], lora_name=name, strength_model=1.0)
    workflow["sample"]["inputs"]["model"] = ["behind", 0]
    return workflow


def _control_net() -> Workflow:
    workflow = sd15(control=0.5)
    workflow["place"] = node("MultiGPUPlaceControlNet", control_net=["controlnet", 0], compute_device=NODE_B)
    workflow["control"]["inputs"]["control_net"] = ["place", 0]
    return workflow


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(studio: Studio, case: str) -> None:
    workflow, words = REFUSED[case]
    with pytest.raises(Exception, match=words):
        studio.draw(workflow())


def _own_file(studio: Studio, patch: pytest.MonkeyPatch) -> None:
    """A file that only this machine has."""
    folder = studio.models / "vae"
    (folder / "other.safetensors").write_bytes((folder / "toy_taef1.safetensors").read_bytes())


def _longer_file(studio: Studio, patch: pytest.MonkeyPatch) -> None:
    (studio.models / "vae" / "other.safetensors").write_bytes(b"x" * 1001)
    (studio.elsewhere / "vae" / "other.safetensors").write_bytes(b"x" * 1000)


def _other_version(studio: Studio, patch: pytest.MonkeyPatch) -> None:
    client = loaded("host.remote.client")
    told = client.versions
    patch.setattr(client, "versions", lambda runtime: {**told(runtime), "ComfyUI": "0.29.9"})


def _own_node(studio: Studio, patch: pytest.MonkeyPatch) -> None:
    """A node that only this machine has, in the place of the loader."""
    import nodes

    class Own(nodes.NODE_CLASS_MAPPINGS["VAELoader"]):  # type: ignore[misc]
        pass

    patch.setitem(nodes.NODE_CLASS_MAPPINGS, "VAELoader only here", Own)


MISMATCHES = {
    "a file that is not there": (_own_file, "other", r"has no vae/other.safetensors \(.* on this machine\); copy it"),
    "a file of another size": (
        _longer_file, "other", "vae/other.safetensors has 1000 bytes on ray://node-b and 1001 on this machine",
    ),
    "another version": (_other_version, "toy_taef1", "ComfyUI is {version} on ray://node-b and 0.29.9 on this machine"),
    "a node that is not there": (_own_node, "toy_taef1", "the node VAELoader only here is not on ray://node-b"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_machine_that_is_not_like_this_one_is_refused(
    studio: Studio, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, file, words = MISMATCHES[case]
    studio.forget()
    make(studio, monkeypatch)
    workflow = placed(flux(), "vae", compute_device=NODE_B)
    workflow["vae"] = node("VAELoader only here" if make is _own_node else "VAELoader", vae_name=f"{file}.safetensors")
    refused = rf"ray://node-b is not like this machine: .*{words.replace('{version}', re.escape(HOST.version))}"
    with pytest.raises(Exception, match=refused):
        studio.draw(workflow)
    assert set(studio.methods()) <= {"memory", "drop", "facts"}, "nothing was built"
    for folder in (studio.models, studio.elsewhere):
        (folder / "vae" / "other.safetensors").unlink(missing_ok=True)


def test_local_placement_still_works(studio: Studio) -> None:
    studio.methods()
    assert torch.equal(studio.draw(placed(flux(), "model", compute_device="cpu")), studio.draw(flux()))
    assert studio.methods() == []
