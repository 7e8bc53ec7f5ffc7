"""A placed model draws what the unplaced one draws, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.engine.studio import Studio


def test_flux_with_text_encoder_and_vae(studio: Studio) -> None:
    model, clip, vae = studio.flux(), studio.clip(), studio.vae("toy_taef1.safetensors")
    empty = torch.zeros(1, 16, 8, 8)
    stock = studio.picture(model, clip, vae, empty)
    studio.unload()
    placed = studio.place(model), studio.place_clip(clip), studio.place_vae(vae)
    assert torch.equal(studio.picture(*placed, empty), stock)
    assert studio.resting(placed[0]) == studio.planned(placed[0])
    assert studio.resting(placed[1].patcher) == studio.planned(placed[1].patcher)
    assert studio.resting(placed[2].patcher) == studio.planned(placed[2].patcher)
    assert torch.equal(studio.picture(*placed, empty), stock)


def test_sd15_checkpoint(studio: Studio) -> None:
    model, clip, vae = studio.sd15()
    empty = torch.zeros(1, 4, 8, 8)
    stock = studio.picture(model, clip, vae, empty, cfg=4.0)
    studio.unload()
    placed = studio.place(model), studio.place_clip(clip), studio.place_vae(vae)
    assert torch.equal(studio.picture(*placed, empty, cfg=4.0), stock)
    assert studio.resting(placed[0]) == studio.planned(placed[0])


def test_wan_video(studio: Studio) -> None:
    model, clip, vae = studio.wan(), studio.clip(), studio.vae("toy_wan_vae.safetensors")
    empty = torch.zeros(1, 16, 2, 8, 8)
    stock = studio.picture(model, clip, vae, empty)
    studio.unload()
    placed = studio.place(model), clip, studio.place_vae(vae)
    assert torch.equal(studio.picture(*placed, empty), stock)
    assert studio.resting(placed[0]) == studio.planned(placed[0])


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_storage_travels_as_fp8(studio: Studio, dtype: str) -> None:
    model = studio.flux(dtype)
    stock = studio.latent(model)
    studio.unload()
    placed = studio.place(model)
    assert torch.equal(studio.latent(placed), stock)
    assert studio.resting(placed) == studio.planned(placed)
    assert sum(studio.planned(placed).values()) < 0.55 * sum(studio.planned(studio.place(studio.flux())).values())


def test_cfg_runs_every_block_twice_per_step_or_on_a_batch(studio: Studio) -> None:
    model, negative = studio.flux(), studio.conditions()
    negative[0][0] = -negative[0][0]
    stock = studio.latent(model, negative=negative, cfg=3.0)
    studio.unload()
    assert torch.equal(studio.latent(studio.place(model), negative=negative, cfg=3.0), stock)


def test_a_ring_too_small_for_two_blocks_and_one_larger_than_the_model(studio: Studio) -> None:
    model = studio.flux()
    stock = studio.latent(model)
    for ring in (1, 1 << 30):
        studio.unload()
        assert torch.equal(studio.latent(studio.place(model, ring=ring)), stock)
