"""Streamed blocks stay on the compute device as far as there is room, and give way at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigpu.plan import DeviceId
from tests.engine.studio import Studio, measured_once
from tests.engine.test_loading import only_entry

pytestmark = pytest.mark.accelerator

MB = 1 << 20
RESERVE = 8 * MB
"""What the host keeps free here: as small as the models."""


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy import model_management

    from multigpu.host.engine import spare_room

    monkeypatch.setattr(model_management, "EXTRA_RESERVED_VRAM", RESERVE)
    monkeypatch.setattr(model_management, "minimum_inference_memory", lambda: RESERVE)
    monkeypatch.setattr(spare_room, "LEEWAY", 2 * RESERVE)
    monkeypatch.setattr(spare_room, "KEPT", 1)
    monkeypatch.setattr(spare_room, "LEAST", 1 / 2)


@pytest.fixture
def placed(studio: Studio) -> Any:
    return studio.place(studio.flux(), f"{studio.accelerators[0]},20%;cpu,*", fills=True)


@pytest.fixture
def leave(studio: Studio) -> Iterator[Any]:
    """`leave(count)` takes memory of the compute device, so that so many bytes are left to spare."""
    from multigpu.devices.backends import free_bytes
    from multigpu.devices.caches import clear_caches

    device, taken = DeviceId.parse(studio.accelerators[0]), []

    def only(count: int) -> None:
        taken.clear()
        clear_caches([device])
        size = (free_bytes(device) or 0) - RESERVE - count
        taken.append(torch.empty(size, dtype=torch.uint8, device=str(device)))

    yield only
    taken.clear()


def streamer(studio: Studio, placed: Any) -> Any:
    return studio.states.of(placed).residence.streamer


def test_where_there_is_room_nothing_is_copied_any_more(studio: Studio, placed: Any) -> None:
    want = studio.latent(studio.flux(), steps=3)
    studio.unload()
    assert torch.equal(studio.latent(placed, steps=3), want)
    its, plan = streamer(studio, placed), placed.placed.plan
    streamed = sum(block.size for block in its.blocks)
    assert its.retained_bytes == streamed
    assert placed.loaded_size() == plan.bytes_on(plan.compute) + plan.ring_bytes + streamed
    copied = its.counters.copied_bytes
    assert copied < 3.5 * streamed, "in two steps, and in the third, to stay"
    studio.world.reset()
    assert torch.equal(studio.latent(placed, steps=3), want)
    assert streamer(studio, placed) is its and its.counters.copied_bytes == copied
    assert studio.resting(placed) == studio.planned(placed), "all of it rests at its home, too"
    (model,) = studio.snapshot().models
    assert model.retained == streamed and model.ring == its.ring_bytes


def test_only_the_room_that_is_there_is_used(studio: Studio, placed: Any, leave: Any) -> None:
    studio.latent(placed, steps=1)
    its = streamer(studio, placed)
    largest, streamed = max(block.size for block in its.blocks), sum(block.size for block in its.blocks)
    leave(streamed // 2)
    studio.latent(placed, steps=4)
    assert streamed // 2 - 3 * largest < its.retained_bytes <= streamed // 2
    numbers = sorted(index for index, staged in its._staged.items() if staged.retained)
    assert numbers[0] < len(its.blocks) // 4 and numbers[-1] > len(its.blocks) * 3 // 4, "spread evenly"
    retained = its.retained_bytes
    leave(-RESERVE // 4)
    studio.latent(placed, steps=3)
    assert its.retained_bytes == retained, "half of the reserve is enough"
    leave(-RESERVE * 3 // 4)
    studio.latent(placed, steps=3)
    assert its.retained_bytes == 0
    leave(2 * streamed)
    studio.latent(placed, steps=3)
    assert its.retained_bytes == streamed, "a new prompt looks again"


def test_it_gives_way_without_moving_anything(studio: Studio, placed: Any) -> None:
    want = studio.latent(placed, steps=3)
    residence = studio.states.of(placed).residence
    plan, retained = residence.plan, residence.retained_bytes
    studio.world.reset()
    allocated = studio.world.allocated(studio.accelerators[0])
    assert not only_entry(placed).model_unload(retained // 2), "it stays loaded"
    assert residence.retained_bytes == 0 and residence.plan is plan
    assert studio.world.allocated(studio.accelerators[0]) <= allocated - retained
    assert studio.world.links() == {}
    assert torch.equal(studio.latent(placed, steps=3), want)
    assert residence.retained_bytes == retained and residence.plan is plan
    only_entry(placed).model_unload(retained + 2 * MB)
    assert residence.retained_bytes == 0 and residence.plan is not plan, "more was asked for than was retained"
    assert torch.equal(studio.latent(placed, steps=3), want)
    assert residence.retained_bytes > retained, "what had to leave is retained, too, when there is room again"


def test_with_less_room_it_gives_back_and_with_more_it_takes_again(studio: Studio, placed: Any) -> None:
    from comfy import model_management

    device = torch.device(studio.accelerators[0])
    want = studio.latent(placed, steps=3)
    residence = studio.states.of(placed).residence
    plan, retained = residence.plan, residence.retained_bytes
    required = model_management.get_free_memory(device) + placed.loaded_size() - 25 * MB
    model_management.load_models_gpu([placed], memory_required=required - model_management.extra_reserved_memory())
    assert residence.retained_bytes == 0 and residence.plan is plan
    assert torch.equal(studio.latent(placed, steps=3), want)
    assert residence.retained_bytes == retained and residence.plan is plan


def test_patches_reach_what_is_retained(studio: Studio, placed: Any) -> None:
    model = studio.flux()
    want = [studio.latent(model, steps=3), studio.latent(studio.lora(model, 0.8), steps=3)]
    studio.unload()
    patchers = [placed, studio.lora(placed, 0.8)]
    for which in (0, 1, 1, 0, 1):
        assert torch.equal(studio.latent(patchers[which], steps=3), want[which])
    assert studio.states.of(placed).residence.retained_bytes


def test_other_models_are_not_unloaded_for_it(studio: Studio, placed: Any, leave: Any) -> None:
    """The host wants memory to be free before a prompt. What is retained is given back before others have to leave."""
    from comfy import model_management

    vae = studio.vae("toy_taef1.safetensors")
    studio.latent(placed, steps=1)
    model_management.load_models_gpu([vae.patcher])
    its = streamer(studio, placed)
    leave(sum(block.size for block in its.blocks))
    for _ in range(3):
        studio.latent(placed, steps=3)
        assert any(entry.model.model is vae.patcher.model for entry in model_management.current_loaded_models)


def test_only_auto_without_a_reserve_retains(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.host.device_memory import budgets
    from multigpu.plan import Auto, parse_request, quotas
    from multigpu.target import Target

    zero = DeviceId.parse(studio.accelerators[0])
    monkeypatch.setattr(quotas, "default_reserve", lambda budget: budget.free - 20 * MB)
    placer = replace(studio.placer, inventory=measured_once())
    budget, *_ = budgets(studio.placer.inventory.devices)
    asked = {Auto(): True, Auto(budget.free - 20 * MB): False, parse_request(f"{zero},20%;cpu,*"): False}
    for request, fills in asked.items():
        model = placer.place(studio.flux(), Target(None, request))
        assert model.placed.plan.streamed and model.placed.fills is fills
