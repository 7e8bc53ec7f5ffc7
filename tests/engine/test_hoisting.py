"""Layers that see one token are computed ahead: the same picture, bit for bit, with fewer bytes copied."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigpu.plan import search, types
from multigpu.stream import hoisting
from multigpu.stream.hoisting import Hoisting
from tests.engine import tiny
from tests.engine.studio import Studio

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def slow_link(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that hoisting is worth it, in steps of a few milliseconds."""
    studio.hoist()
    monkeypatch.setattr(types, "RAM_BANDWIDTH", 1e9)
    monkeypatch.setattr(search, "AHEAD", 0.0)


def half(studio: Studio) -> str:
    return f"{studio.accelerators[0]},50%;cpu,*"


@pytest.fixture
def placed(studio: Studio) -> Any:
    placed = studio.place(studio.flux(), half(studio))
    assert placed.placed.plan.hoisted
    return placed


def streamer(studio: Studio, placed: Any) -> Any:
    return studio.states.of(placed).residence.streamer


def sizes(studio: Studio, placed: Any) -> tuple[int, int]:
    """Bytes of all streamed blocks, and of those that are hoisted."""
    its = streamer(studio, placed)
    return sum(b.size for b in its.blocks), sum(its.blocks[number].size for number in its.hoisting.numbers)


def test_from_the_second_step_on_they_are_not_copied(studio: Studio, placed: Any) -> None:
    want = studio.latent(studio.flux(), steps=6)
    studio.unload()
    assert torch.equal(studio.latent(placed, steps=6), want)
    its, (streamed, hoisted) = streamer(studio, placed), sizes(studio, placed)
    assert hoisted > streamed // 4
    assert its.counters.copied_bytes < streamed + 5 * (streamed - hoisted) + its.ring_bytes
    assert its.counters.hoisted == 5 * len(its.hoisting.numbers)
    copied, misses = its.counters.copied_bytes, its.counters.misses
    assert torch.equal(studio.latent(placed, steps=6), want)
    assert its.counters.copied_bytes - copied == 6 * (streamed - hoisted), (
        "the same prompt again computes nothing ahead"
    )
    assert its.counters.misses == misses and its.counters.unstaged == 0
    studio.latent(placed, steps=8)
    assert its.counters.copied_bytes - copied < 14 * (streamed - hoisted) + hoisted + 2 * its.ring_bytes, (
        "with other sigmas it is done in the first step, although that one is known"
    )


@pytest.mark.once
def test_a_setting_turns_it_off(studio: Studio) -> None:
    studio.placer = replace(studio.placer, hoist=False)
    placed = studio.place(studio.flux(), half(studio))
    assert not placed.placed.plan.hoisted and not placed.get_all_wrappers("apply_model")
    studio.latent(placed, steps=3)
    assert streamer(studio, placed).hoisting is None


@pytest.mark.once
@pytest.mark.parametrize(
    ("sampler", "cfg"), [("euler", 7.0), ("heun", 1.0), ("heun", 7.0), ("dpm_2_ancestral", 1.0), ("dpm_2", 7.0)]
)
def test_samplers(studio: Studio, placed: Any, sampler: str, cfg: float) -> None:
    negative = studio.conditions(words=2)
    how = {"sampler": sampler, "cfg": cfg, "negative": negative, "steps": 4}
    want = studio.latent(studio.flux(), **how)
    studio.unload()
    assert torch.equal(studio.latent(placed, **how), want)
    assert torch.equal(studio.latent(placed, **how), want)
    assert streamer(studio, placed).counters.hoisted


@pytest.mark.once
def test_batches_and_a_part_of_the_schedule(studio: Studio, placed: Any) -> None:
    model, several = studio.flux(), []
    ways: list[dict[str, Any]] = [
        {"empty": torch.zeros(2, 16, 8, 8)}, {"denoise": 0.5, "empty": torch.ones(1, 16, 8, 8)}, {},
        {"empty": torch.zeros(2, 16, 8, 8), "cfg": 3.0, "negative": studio.conditions(words=5)},
    ]  # fmt: skip
    several = [studio.latent(model, steps=4, **{**way}) for way in ways]
    studio.unload()
    for _ in range(2):
        for way, want in zip(ways, several, strict=True):
            before = streamer(studio, placed).counters.hoisted if streamer(studio, placed) else 0
            assert torch.equal(studio.latent(placed, steps=4, **{**way}), want)
            assert streamer(studio, placed).counters.hoisted > before


def other_prompts(studio: Studio) -> list[Any]:
    """The same text throughout: only what hoisted layers see differs, but for the last."""
    return [
        studio.conditions(), studio.conditions(guidance=1.5), studio.conditions(pooled_output=torch.ones(1, 2048)),
        studio.conditions(words=9),
    ]  # fmt: skip


def test_prompts(studio: Studio, placed: Any) -> None:
    model, prompts = studio.flux(), other_prompts(studio)
    want = [studio.latent(model, prompt, steps=3) for prompt in prompts]
    assert len({its.sum().item() for its in want}) == len(want)
    studio.unload()
    for number in (0, 1, 0, 2, 3, 3, 1):
        assert torch.equal(studio.latent(placed, prompts[number], steps=3), want[number]), number
    assert streamer(studio, placed).counters.hoisted > 7 * 2 * len(streamer(studio, placed).hoisting.numbers)


@pytest.mark.once
def test_what_was_kept_for_another_prompt_would_be_seen(
    studio: Studio, placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without comparing inputs, pictures are wrong."""
    model, prompts = studio.flux(), other_prompts(studio)[:3]
    want = [studio.latent(model, prompt, steps=3) for prompt in prompts]
    studio.unload()
    studio.latent(placed, prompts[0], steps=3)
    monkeypatch.setattr(Hoisting, "_verify", lambda self, this: None)
    monkeypatch.setattr(Hoisting, "_find", lambda self, given: next(self._every(), None))
    monkeypatch.setattr(Hoisting, "_missing", lambda self, run, kept: (None, []))
    for prompt, its in zip(prompts[1:], want[1:], strict=True):
        assert not torch.equal(studio.latent(placed, prompt, steps=3), its)


@pytest.mark.once
def test_a_patch_that_changes_what_one_layer_sees(studio: Studio, placed: Any) -> None:
    """From the second step on, in one block: only comparing the inputs of all layers shows it."""

    def replacement(args: Any, extra: Any) -> Any:
        later = args["transformer_options"]["sigmas"][0] < 0.9
        return extra["original_block"]({**args, "vec": args["vec"] * 1.5} if later else args)

    def patched(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_patch_replace(replacement, "dit", "double_block", 2)
        return clone

    want = studio.latent(patched(studio.flux()), steps=4)
    studio.unload()
    assert not torch.equal(studio.latent(placed, steps=4), want)
    with_patch = patched(placed)
    assert torch.equal(studio.latent(with_patch, steps=4), want)
    assert torch.equal(studio.latent(with_patch, steps=4), want)
    assert torch.equal(studio.latent(placed, steps=4), studio.latent(placed, steps=4))


def modulated(model: Any, strength: float) -> Any:
    """With patches on layers that are hoisted, and on one that is not."""
    clone = model.clone()
    weights = clone.model_state_dict()
    keys = ["double_blocks.1.img_mod.lin.weight", "single_blocks.2.modulation.lin.bias", "time_in.in_layer.weight"]
    noise = {
        f"diffusion_model.{key}": torch.randn(
            weights[f"diffusion_model.{key}"].shape, generator=torch.Generator().manual_seed(4)
        )
        for key in keys
    }
    clone.add_patches({key: ("diff", (change,)) for key, change in noise.items()}, strength)
    return clone


def test_patches(studio: Studio, placed: Any) -> None:
    model = studio.flux()
    want = [studio.latent(its, steps=3) for its in (model, modulated(model, 0.05), studio.lora(model, 0.8))]
    studio.unload()
    patchers = [placed, modulated(placed, 0.05), studio.lora(placed, 0.8)]
    for number in (0, 1, 0, 2, 1, 1, 0):
        assert torch.equal(studio.latent(patchers[number], steps=3), want[number]), number
    assert streamer(studio, placed).counters.hoisted


@pytest.mark.once
@pytest.mark.parametrize("where", ["double_blocks.2.img_mlp.0", "double_blocks.2.img_mod.lin", "time_in.in_layer"])
def test_an_interruption_in_the_middle(studio: Studio, placed: Any, where: str) -> None:
    import comfy.model_management as memory

    want = studio.latent(studio.flux(), steps=4)
    studio.unload()
    module = placed.model.get_submodule(f"diffusion_model.{where}")
    for at in (1, 2, 4, 7):
        left = [at]

        def stop(*_: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise memory.InterruptProcessingException

        handle = module.register_forward_pre_hook(stop)
        with suppress(memory.InterruptProcessingException):
            studio.latent(placed, studio.conditions(guidance=float(at)), steps=4)
        handle.remove()
        assert left[0] <= 0 or at == 7, "it was interrupted, except where it does not run that often"
        assert "forward" not in vars(module)
        assert torch.equal(studio.latent(placed, steps=4), want)


@pytest.mark.once
def test_a_module_with_a_forward_of_its_own_is_streamed(studio: Studio, placed: Any) -> None:
    module = placed.model.get_submodule("diffusion_model.double_blocks.0.txt_mod.lin")
    calls, own = [], module.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return own(x) * 2

    want_model = studio.flux()
    theirs = want_model.model.get_submodule("diffusion_model.double_blocks.0.txt_mod.lin")
    plain = theirs.forward
    theirs.forward = lambda x: plain(x) * 2
    want = studio.latent(want_model, steps=4)
    studio.unload()
    module.forward = counted
    assert torch.equal(studio.latent(placed, steps=4), want)
    assert len(calls) == 4 and module.forward is counted
    assert streamer(studio, placed).counters.hoisted
    del module.forward


@pytest.mark.once
@pytest.mark.parametrize("family", ["qwen", "sd3"])
def test_other_families(studio: Studio, family: str) -> None:
    from comfy.model_patcher import ModelPatcher

    model = ModelPatcher(getattr(tiny, family)(), *tiny.devices())
    how: dict[str, Any] = {"positive": studio.conditions(tiny.WIDTH, tiny.WIDTH), "steps": 4}
    how["empty"] = torch.zeros(1, 16, 1, 8, 8) if family == "qwen" else torch.zeros(1, 16, 8, 8)
    want = studio.latent(model, **{**how})
    assert want.isfinite().all()
    studio.unload()
    placed = studio.place(model, f"{studio.accelerators[0]},10%;cpu,*")
    assert len(placed.placed.plan.hoisted) >= 4
    assert torch.equal(studio.latent(placed, **{**how}), want)
    its, (streamed, hoisted) = streamer(studio, placed), sizes(studio, placed)
    assert its.counters.hoisted == 3 * len(its.hoisting.numbers) == 3 * len(placed.placed.plan.hoisted)
    copied = its.counters.copied_bytes
    assert torch.equal(studio.latent(placed, **{**how}), want)
    assert its.counters.copied_bytes - copied == 4 * (streamed - hoisted)


@pytest.mark.once
def test_scaled_weights(studio: Studio) -> None:
    model = studio.flux("fp8_e4m3fn")
    want = studio.latent(model, steps=4)
    studio.unload()
    placed = studio.place(model, half(studio))
    for _ in range(2):
        assert torch.equal(studio.latent(placed, steps=4), want)
    assert streamer(studio, placed).counters.hoisted == 7 * len(placed.placed.plan.hoisted)


@pytest.mark.pages
def test_weights_in_the_model_file(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are patched each time they pass; those that are hoisted once in a run."""
    from multigpu.host.placing import disk

    monkeypatch.setattr(disk, "reading_speed", lambda pages, cached: 1e6)
    model = studio.flux()
    want = [studio.latent(its, steps=3) for its in (model, modulated(model, 0.05))]
    studio.unload()
    placed = studio.place(studio.flux(), f"{studio.accelerators[0]},30%;cpu,20%;disk,*")
    assert {placement.home.type for placement in placed.placed.plan.hoisted} == {"disk"}, "the slowest"
    patchers = [placed, modulated(placed, 0.05)]
    for number in (0, 1, 1, 0):
        assert torch.equal(studio.latent(patchers[number], steps=3), want[number])
    assert streamer(studio, placed).counters.hoisted


@pytest.mark.once
def test_where_it_never_helps_it_is_given_up(
    studio: Studio, placed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hoisting, "PATIENCE", 4)
    model = studio.flux()
    want = studio.latent(model, steps=1)
    studio.unload()
    caplog.set_level(logging.INFO, "multigpu")
    for _ in range(4):
        assert torch.equal(studio.latent(placed, steps=1), want), "one step: there is nothing to compute ahead"
    assert "could not be computed ahead: they are streamed from now on" in caplog.text
    assert studio.states.of(placed).residence.plan.hoisted, "plans change between prompts only"
    assert torch.equal(studio.latent(placed, steps=1), want)
    residence = studio.states.of(placed).residence
    assert not residence.plan.hoisted and residence.hoisting is None
    assert residence.plan.bytes_by_home().keys() == placed.placed.plan.bytes_by_home().keys()
    plan = residence.plan
    assert torch.equal(studio.latent(placed, steps=1), want)
    assert residence.plan is plan


@pytest.mark.once
def test_kept_outputs_are_bounded(studio: Studio, placed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = studio.latent(studio.flux(), steps=8)
    studio.unload()
    studio.latent(placed, steps=3)
    its = streamer(studio, placed)
    each = its.hoisting.kept_bytes // 3
    monkeypatch.setattr(hoisting, "LIMIT", 4 * each)
    for _ in range(2):
        assert torch.equal(studio.latent(placed, steps=8), want)
        assert its.hoisting.kept_bytes <= 4 * each
    assert its.counters.hoisted >= (2 + 5 + 5) * len(its.hoisting.numbers)


@pytest.mark.once
def test_what_is_hoisted_is_not_retained(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy import model_management

    monkeypatch.setattr(model_management, "EXTRA_RESERVED_VRAM", 8 << 20)
    want = studio.latent(studio.flux(), steps=6)
    studio.unload()
    placed = studio.place(studio.flux(), half(studio), fills=True)
    assert torch.equal(studio.latent(placed, steps=6), want)
    streamed, hoisted = sizes(studio, placed)
    assert streamer(studio, placed).retained_bytes == streamed - hoisted


@pytest.mark.once
def test_other_calls_of_the_model_stream(studio: Studio, placed: Any) -> None:
    """Code that calls the model itself, without a sampling run."""
    import comfy.model_management as memory

    model = studio.flux()

    def call(patcher: Any) -> torch.Tensor:
        memory.load_models_gpu([patcher])
        x = torch.ones(1, 16, 8, 8, device=patcher.load_device)
        text = torch.ones(1, 16, 4096, device=patcher.load_device)
        y = torch.ones(1, 2048, device=patcher.load_device)
        t = torch.full((1,), 0.5, device=patcher.load_device)
        return patcher.model.apply_model(x, t, c_crossattn=text, y=y, guidance=t).cpu()

    want = call(model)
    studio.unload()
    studio.latent(placed, steps=3)
    for _ in range(2):
        assert torch.equal(call(placed), want)


@pytest.mark.once
def test_half_of_a_model_away_costs_no_time(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the simulator's clock, where the link needs a quarter longer for that half than the model computes."""
    zero, model = studio.accelerators[0], studio.flux()
    studio.world.set_compute_rate(zero, flops=2e11)

    def step(text: str, hoist: bool = True) -> float:
        studio.unload()
        studio.placer = replace(studio.placer, hoist=hoist)
        placed = studio.place(model, text, ring=None)
        studio.latent(placed, steps=6)
        torch.cuda.synchronize()
        begin = studio.world.clock()
        studio.latent(placed, steps=6)
        torch.cuda.synchronize()
        return float(studio.world.clock() - begin) / 6

    resident = step(f"{zero},100%")
    link = 19.4e6 / (1.25 * resident)
    studio.world.set_bandwidth("cpu", zero, link)
    monkeypatch.setattr(types, "RAM_BANDWIDTH", link)
    streamed, hoisted = step(half(studio), hoist=False), step(half(studio))
    assert streamed > 1.2 * resident
    assert hoisted < 1.05 * resident, (hoisted, streamed, resident)
