"""Interrupts, exceptions and full devices: afterwards the model is usable or cleanly unloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.studio import Studio


class Stumble(RuntimeError):
    """Raised by the test inside a block."""


def stumble_in(placed: Any, block: str, error: BaseException) -> Any:
    """`block` raises once, in the middle of its forward, when it has its weights."""
    module = placed.model.get_submodule(block)
    original = type(module).forward
    calls = iter([True])

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is module and next(calls, False):
            raise error
        return original(self, *args, **kwargs)

    return original, type(module), forward


def streamed_block(placed: Any) -> str:
    plan = placed.placed.plan
    blocks = [p.block for p in (plan.streamed or plan.placements) if p.block.endswith("linear1")]
    return blocks[len(blocks) // 2]


@pytest.mark.parametrize("kind", ["interrupt", "exception"])
def test_a_step_that_breaks_off(studio: Studio, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import comfy.model_management as memory

    model = studio.flux()
    stock = studio.latent(model)
    placed = studio.place(model)
    studio.latent(placed)
    error = memory.InterruptProcessingException() if kind == "interrupt" else Stumble()
    _, owner, forward = stumble_in(placed, streamed_block(placed), error)
    with monkeypatch.context() as patched:
        patched.setattr(owner, "forward", forward)
        with pytest.raises(type(error)):
            studio.latent(placed)
    streamer = studio.states.of(placed).residence.streamer
    assert torch.equal(studio.latent(placed), stock)
    assert studio.states.of(placed).residence.streamer is streamer, "nothing was loaded again"
    assert studio.resting(placed) == studio.planned(placed)
    assert torch.equal(studio.latent(studio.lora(placed, 0.3)), studio.latent(studio.lora(model, 0.3)))


def test_a_step_that_breaks_off_and_then_unloading(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as memory

    model = studio.flux()
    placed = studio.place(model)
    studio.latent(placed)
    before = {key: value.cpu() for key, value in placed.model.state_dict().items()}
    _, owner, forward = stumble_in(placed, streamed_block(placed), memory.InterruptProcessingException())
    with monkeypatch.context() as patched:
        patched.setattr(owner, "forward", forward)
        with pytest.raises(memory.InterruptProcessingException):
            studio.latent(placed)
    if studio.accelerators:
        assert placed.partially_unload(torch.device("cpu"), 1) > 0, "some of it can still leave"
    studio.unload()
    after = placed.model.state_dict()
    assert set(studio.resting(placed)) == {"cpu"}
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.accelerator
def test_out_of_memory_on_a_donor_while_placing(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says that there is room, and there is not: another process was quicker."""
    import comfy.model_management as memory

    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    placed = studio.place(model)
    donor = studio.accelerators[1]
    studio.world.limit(donor, 4 << 20)
    real = memory.get_free_memory

    def hopeful(device: Any = None, torch_free_too: bool = False) -> Any:
        free = real(device, torch_free_too)
        return free if torch_free_too else free + (6 << 30)

    with monkeypatch.context() as context:
        context.setattr(memory, "get_free_memory", hopeful)
        with pytest.raises(torch.OutOfMemoryError):
            studio.latent(placed)
    assert set(studio.resting(placed)) == {"cpu"}
    assert studio.world.pinned_bytes() == 0
    assert not any(studio.world.allocated(device) for device in studio.accelerators)
    studio.world.limit(donor, 6 << 30)
    assert torch.equal(studio.latent(placed), stock)


def test_out_of_memory_on_the_compute_device_while_baking(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    model = studio.flux()
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.place(model)
    with_lora = studio.lora(placed, 0.8)
    real = type(with_lora).patch_weight_to_device
    countdown = iter(range(5))

    def scarce(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(countdown, None) is None:
            raise torch.OutOfMemoryError("no room")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(type(with_lora), "patch_weight_to_device", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            studio.latent(with_lora)
    assert torch.equal(studio.latent(placed), stock)
    assert torch.equal(studio.latent(with_lora), patched)
