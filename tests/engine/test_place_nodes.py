"""Place nodes on several devices, and components on different devices in one workflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigpu.errors import UnknownDevice
from multigpu.plan import parse_request
from multigpu.target import Resolver
from tests.engine.pack import Pack, decoded, patcher_of, resting, small_vision, text
from tests.engine.studio import Studio, load_whole

CONTROL = {"control_net_name": "toy_sd15_controlnet.safetensors"}


def other(studio: Studio) -> str:
    return studio.accelerators[1] if studio.simulated else "cpu"


def sd15_latent(studio: Studio, model: Any, control: Any = None) -> torch.Tensor:
    import nodes

    positive = studio.conditions(768)
    if control is not None:
        hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(9))
        positive, _ = nodes.ControlNetApplyAdvanced().apply_controlnet(positive, positive, control, hint, 1.0, 0.0, 1.0)
    return studio.latent(model, positive, empty=torch.zeros(1, 4, 8, 8))


@pytest.mark.parametrize(
    "widgets",
    [
        {"mode": "auto"},
        {"mode": "virtual VRAM", "virtual_vram_gb": 0.01, "donor_device": "cpu"},
        {"mode": "expert", "expert_mode_allocations": "25%"},
    ],
    ids=["auto", "virtual VRAM", "expert"],
)
def test_a_model_placed_elsewhere_draws_the_same_and_leaves_the_given_one_alone(
    studio: Studio, pack: Pack, widgets: dict[str, Any]
) -> None:
    if "expert_mode_allocations" in widgets:
        widgets = {
            **widgets,
            "expert_mode_allocations": f"{other(studio)},25%;cpu,75%" if studio.simulated else "cpu,*",
        }
    model = studio.flux()
    stock, home = studio.latent(model), str(model.load_device)
    placed = pack.one("MultiGPUPlaceModel", model=model, compute_device=other(studio), **widgets)
    assert str(placed.load_device) == other(studio) and str(model.load_device) == home
    for _ in range(2):  # one after the other, they do not take each other's weights away
        assert torch.equal(studio.latent(placed), stock)
        assert torch.equal(studio.latent(model), stock)
    found = resting(placed)
    assert found.keys() <= {other(studio), "cpu"}
    if studio.simulated:
        assert ("cpu" in found) == (widgets["mode"] != "auto")


@pytest.mark.accelerator
def test_gpu_n_is_the_nth_accelerator(studio: Studio, pack: Pack) -> None:
    placed = pack.one(
        "MultiGPUPlaceModel",
        model=studio.flux(),
        compute_device="gpu:1",
        mode="expert",
        expert_mode_allocations="gpu:1,50%;gpu:2,50%",
    )
    assert resting(placed).keys() == {*studio.accelerators[1:]}


def test_text_encoder_and_vae_move_with_their_wrappers(studio: Studio, pack: Pack) -> None:
    clip, vae = studio.clip(), studio.vae("toy_taef1.safetensors")
    words, pixels = text(clip), decoded(vae)
    moved_clip = pack.one("MultiGPUPlaceCLIP", clip=clip, compute_device="cpu")
    assert moved_clip.cond_stage_model is moved_clip.patcher.model
    assert torch.equal(text(moved_clip), words)
    moved_vae = pack.one("MultiGPUPlaceVAE", vae=vae, compute_device=other(studio))
    assert str(moved_vae.device) == other(studio) and moved_vae.first_stage_model is moved_vae.patcher.model
    assert torch.equal(decoded(moved_vae), pixels)
    assert [*resting(moved_clip)] == ["cpu"] and [*resting(moved_vae)] == [other(studio)]
    assert torch.equal(text(clip), words) and torch.equal(decoded(vae), pixels)


def test_a_controlnet_runs_on_another_device_than_the_model(studio: Studio, pack: Pack) -> None:
    import nodes

    model, _, _ = studio.sd15()
    control = nodes.ControlNetLoader().load_controlnet(CONTROL["control_net_name"])[0]
    stock = sd15_latent(studio, model, control)
    effect = (stock - sd15_latent(studio, model)).norm()
    assert effect > 0
    for placed in (
        pack.one("MultiGPUPlaceControlNet", control_net=control, compute_device=other(studio)),
        pack.one("ControlNetLoaderMultiGPU", **CONTROL, device=other(studio)),
    ):
        assert torch.equal(sd15_latent(studio, model, placed), stock)
        assert [*resting(placed)] == [other(studio)], "it was not moved to the model's device"
    on_cpu = pack.one("MultiGPUPlaceControlNet", control_net=control, compute_device="cpu")
    rounding = (sd15_latent(studio, model, on_cpu) - stock).norm()  # other number types on the cpu
    assert rounding < 0.02 * effect
    assert torch.equal(sd15_latent(studio, model, control), stock), "the given one works as before"


def test_a_clip_vision_model_is_placed(studio: Studio, pack: Pack) -> None:
    vision = small_vision()
    random = torch.Generator().manual_seed(1)
    image = torch.rand(1, 32, 32, 3, generator=random)
    stock = vision.encode_image(image)["image_embeds"].cpu()
    placed = pack.one("MultiGPUPlaceCLIPVision", clip_vision=vision, compute_device=other(studio))
    assert str(placed.load_device) == other(studio) and placed.model is placed.patcher.model
    assert torch.equal(placed.encode_image(image)["image_embeds"].cpu(), stock)
    assert [*resting(placed)] == [other(studio)]
    assert torch.equal(vision.encode_image(image)["image_embeds"].cpu(), stock)


def test_tiled_decoding_and_encoding_on_another_device(studio: Studio, pack: Pack) -> None:
    _, _, vae = studio.sd15()
    latent = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(2))  # small: torch's bf16 is slow on a CPU
    placed = pack.one("MultiGPUPlaceVAE", vae=vae, compute_device=other(studio))
    stock = vae.decode_tiled(latent, tile_x=4, tile_y=4, overlap=1).cpu()
    assert torch.equal(placed.decode_tiled(latent, tile_x=4, tile_y=4, overlap=1).cpu(), stock)
    pixels = torch.rand(1, 48, 48, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(placed.encode_tiled(pixels, 32, 32, 8).cpu(), vae.encode_tiled(pixels, 32, 32, 8).cpu())


def test_placed_models_and_text_encoders_are_merged(studio: Studio, pack: Pack) -> None:
    from comfy_extras.nodes_model_merging import CLIPMergeSimple, ModelMergeSimple

    spread = {
        "mode": "expert",
        "expert_mode_allocations": f"{other(studio)},25%;cpu,75%" if studio.simulated else "cpu,*",
    }
    base, second = studio.flux(), studio.lora(studio.flux(), 1.0)
    stock = studio.latent(ModelMergeSimple().merge(base, second, 0.5)[0])
    placed = pack.one("MultiGPUPlaceModel", model=base, compute_device=other(studio), **spread)
    away = pack.one("MultiGPUPlaceModel", model=second, compute_device="cpu", mode="auto")
    assert torch.allclose(studio.latent(ModelMergeSimple().merge(placed, second, 0.5)[0]), stock, atol=2e-2)
    assert torch.allclose(studio.latent(ModelMergeSimple().merge(placed, away, 0.5)[0]), stock, atol=2e-2)
    clip = studio.clip()
    merged = CLIPMergeSimple().merge(pack.one("MultiGPUPlaceCLIP", clip=clip, compute_device="cpu"), clip, 0.5)[0]
    assert torch.allclose(text(merged), text(clip), atol=1e-3)


def test_custom_and_advanced_samplers(studio: Studio, pack: Pack) -> None:
    import nodes
    from comfy_extras import nodes_custom_sampler as custom

    model = studio.flux()
    placed = pack.one("MultiGPUPlaceModel", model=model, compute_device=other(studio))
    empty, words = {"samples": torch.zeros(1, 16, 8, 8)}, studio.conditions()
    for way in ("advanced", "custom"):
        drawn = []
        for each in (model, placed):
            if way == "advanced":
                sampled = nodes.KSamplerAdvanced().sample(
                    each, "enable", 1, 2, 1.0, "euler", "simple", words, words, dict(empty), 0, 2, "disable"
                )[0]
            else:
                guider = custom.BasicGuider.execute(each, words).result[0]
                sampler = custom.KSamplerSelect.execute("euler").result[0]
                sigmas = custom.BasicScheduler.execute(each, "simple", 2, 1.0).result[0]
                noise = custom.RandomNoise.execute(1).result[0]
                sampled = custom.SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, dict(empty)).result[0]
            drawn.append(sampled["samples"].cpu())
        assert torch.equal(*drawn), way


def test_what_keeps_no_patcher_is_refused_with_the_reason(studio: Studio, pack: Pack) -> None:
    with pytest.raises(ValueError, match="a dict cannot be placed: it does not keep its weights in one of ComfyUI's"):
        pack.one("MultiGPUPlaceModel", model={})


@pytest.mark.accelerator
def test_eject_models_empties_the_compute_device_but_for_what_is_kept(studio: Studio, pack: Pack) -> None:
    import comfy.model_management as memory

    device = other(studio)
    kept = pack.one("CLIPLoaderDisTorch2MultiGPU", clip_name="toy_clip_l.safetensors", type="sd3", device=device,
                    virtual_vram_gb=0.0, keep_loaded="keep")  # fmt: skip
    gone = pack.one("VAELoaderMultiGPU", vae_name="toy_taef1.safetensors", device=device)
    resting(kept), resting(gone)
    names = {"unet_name": "toy_flux.safetensors", "weight_dtype": "default", "compute_device": device}
    pack.one("UNETLoaderDisTorch2MultiGPU", **names, eject_models=False)
    loaded = [entry.model.model for entry in memory.current_loaded_models]
    assert patcher_of(gone).model in loaded and patcher_of(kept).model in loaded
    pack.one("UNETLoaderDisTorch2MultiGPU", **names, eject_models=True)
    loaded = [entry.model.model for entry in memory.current_loaded_models]
    assert patcher_of(gone).model not in loaded and patcher_of(kept).model in loaded


class Stopped(Exception):
    """What the host raises out of its progress bar when the user interrupts."""


def test_loading_moves_the_hosts_bar_and_may_be_interrupted(studio: Studio, pack: Pack) -> None:
    import comfy.utils

    model = studio.flux()
    stock = studio.latent(model)
    seen: list[int] = []
    stop_at = 1  # the host shows at most ten updates a second: only the first and the last are certain

    def hook(value: int, total: int, _preview: Any, **_more: Any) -> None:
        seen.append(100 * value // total)
        if value >= stop_at:
            raise Stopped

    placed = studio.place(studio.flux())
    comfy.utils.set_progress_bar_global_hook(hook)
    try:
        with pytest.raises(Stopped):
            load_whole(placed)
        assert seen == sorted(seen) and seen[-1] < 100
        stop_at = 101
        load_whole(placed)
        assert seen[-1] == 100
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    assert torch.equal(studio.latent(placed), stock)


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("compute", "text"),
    [("default", "{0},50%;{9},20%;cpu,30%"), ("{9}", "{9},50%;cpu,*"), ("default", "{9},0.5;cpu,*")],
)
def test_doing_without_devices_that_are_not_here(studio: Studio, pack: Pack, compute: str, text: str) -> None:
    """As the setting allows: what was to rest on them rests in RAM, and another device computes."""
    zero = studio.accelerators[0]
    named = [part.replace("{0}", zero).replace("{9}", zero[:-1] + "9") for part in (compute, text)]
    request = parse_request(named[1])
    model = studio.flux()
    stock = studio.latent(model)
    with pytest.raises(UnknownDevice, match=":9 is not on this machine"):
        pack.runtime.resolver.target(named[0], request)
    target = Resolver(pack.runtime.inventory, fall_back=True).target(named[0], request)
    placed = pack.runtime.placer.place(model, target)
    assert torch.equal(studio.latent(placed), stock)
    assert set(studio.resting(placed)) == {zero, "cpu"}
    assert studio.resting(placed)["cpu"] > 15 << 20
