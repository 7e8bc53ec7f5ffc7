"""What the host reads of a placed model is true, and the host's own loading and unloading around it stays right."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch

from multigpu.stream import residence as residence_module
from tests.engine.studio import Studio, load_whole


def only_entry(patcher: Any) -> Any:
    import comfy.model_management as memory

    (entry,) = [loaded for loaded in memory.current_loaded_models if loaded.model.model is patcher.model]
    return entry


def test_numbers_for_the_host(studio: Studio) -> None:
    placed = studio.place(studio.flux())
    plan = placed.placed.plan
    share = plan.bytes_on(plan.compute) + plan.ring_bytes
    assert placed.model_size() == share
    studio.latent(placed)
    assert placed.loaded_size() == share
    entry = only_entry(placed)
    assert entry.model_offloaded_memory() == 0
    assert entry.model_memory_required(placed.load_device) == 0
    assert placed.lowvram_patch_counter() == 0
    from multigpu.stream.census import bytes_by_device

    counted = {str(device): count for device, count in bytes_by_device(placed.model).items()}
    assert counted == studio.planned(placed)
    if studio.simulated:
        zero, one, two = studio.accelerators
        rounding = 512 * len(plan.placements)
        assert 0 <= studio.world.allocated(zero) - share < rounding
        assert studio.world.allocated(one) == studio.planned(placed)[one]
        assert studio.world.allocated(two) == studio.planned(placed)[two]


def test_loading_again_moves_nothing(studio: Studio) -> None:
    import comfy.model_management as memory

    placed = studio.place(studio.flux())
    load_whole(placed)
    residence = studio.states.of(placed).residence
    streamer = residence.streamer
    if studio.simulated:
        studio.world.reset()
    memory.load_models_gpu([placed])
    memory.load_models_gpu([placed.clone().clone()])
    assert residence.streamer is streamer
    if studio.simulated:
        assert studio.world.links() == {}


def test_unloading_leaves_an_ordinary_model(studio: Studio) -> None:
    """Attributes that differ from their class's, hooks and bytes: as after an unplaced load and unload."""
    model = studio.flux()
    studio.latent(model)
    studio.unload()

    def portrait() -> dict[str, Any]:
        picture: dict[str, Any] = {}
        for name, module in model.model.named_modules():
            plain = (bool, int, float, str, list, torch.dtype, torch.device)
            for attribute, value in vars(module).items():
                if value != getattr(type(module), attribute, None):
                    picture[f"{name}:{attribute}"] = value if isinstance(value, plain) else type(value)
            picture[f"{name}:hooks"] = (len(module._forward_pre_hooks), len(module._forward_hooks))
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    picture[f"{name}.{key}"] = (type(tensor), tensor.device, tensor.stride(), tensor.tolist())
        return picture

    before = portrait()
    studio.latent(studio.lora(studio.place(model), 0.5))
    studio.settle()
    studio.unload()
    after = portrait()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []


@pytest.mark.accelerator
def test_partial_unload_and_growing_back(studio: Studio) -> None:
    zero = studio.accelerators[0]
    placed = studio.place(studio.flux())
    stock = studio.latent(placed)
    allocated, loaded = studio.world.allocated(zero), placed.loaded_size()
    freed = placed.partially_unload(placed.offload_device, 2 << 20)
    assert freed >= 2 << 20
    assert placed.loaded_size() == loaded - freed
    assert abs(allocated - studio.world.allocated(zero) - freed) < 1 << 20
    assert only_entry(placed).model_offloaded_memory() == freed
    assert torch.equal(studio.latent(placed), stock)
    assert placed.loaded_size() == loaded
    assert studio.resting(placed) == studio.planned(placed)


@pytest.mark.accelerator
def test_less_room_than_the_plan_wants(studio: Studio) -> None:
    """The host's budget is below the plan's share of the compute device: more is streamed, the picture is the same."""
    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    placed = studio.place(model, f"{studio.accelerators[0]},100%")
    placed.partially_load(placed.load_device, 8 << 20)
    assert placed.loaded_size() <= 8 << 20
    assert studio.resting(placed)["cpu"] > 0
    assert studio.states.of(placed).residence.streamer is not None
    placed.detach()
    assert torch.equal(studio.latent(placed), stock)


@pytest.mark.cuda
def test_no_room_at_all_means_no_blocks_each_time(studio: Studio) -> None:
    """The host then allows the bytes that are loaded, minus as many: none, which is not the same as no limit."""
    from comfy import model_management

    zero = studio.accelerators[0]
    placed = studio.place(studio.flux(), f"{zero},100%")
    counts = []
    for _ in range(3):
        model_management.load_models_gpu(
            [placed], memory_required=model_management.get_total_memory(placed.load_device)
        )
        counts.append(studio.resting(placed).get(zero, 0))
    assert counts[0] < studio.planned(placed)[zero] // 10 and counts == counts[:1] * 3


def test_two_plans_and_none_for_one_model(studio: Studio) -> None:
    model = studio.flux()
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.6))
    one = studio.place(model)
    other = studio.place(model, "cpu,*" if not studio.simulated else f"{studio.accelerators[0]},60%;cpu,*")
    for patcher in (one, other, model, one, model, other):
        assert torch.equal(studio.latent(patcher), stock)
        assert torch.equal(studio.latent(studio.lora(patcher, 0.6)), patched)
    assert studio.resting(other) == studio.planned(other)


@pytest.mark.accelerator
def test_one_model_on_two_compute_devices_in_turn(studio: Studio) -> None:
    zero, one, _ = studio.accelerators
    model = studio.flux()
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.6))
    elsewhere = model.clone()
    elsewhere.load_device = torch.device(one)
    here, there = studio.place(model, f"{zero},40%;cpu,*"), studio.place(elsewhere, f"{one},30%;{zero},30%;cpu,*")
    for placed in (here, there, here, there):
        assert torch.equal(studio.latent(placed), stock)
        assert studio.resting(placed) == studio.planned(placed)
        assert torch.equal(studio.latent(studio.lora(placed, 0.6)), patched)


@pytest.mark.accelerator
def test_another_plan_holds_no_memory_of_the_one_before(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none may be left unused so that other blocks need not move."""
    monkeypatch.setattr(residence_module, "UNUSED", 0)
    zero, one, _ = studio.accelerators
    model = studio.flux()
    for share in (60, 30, 45):
        placed = studio.place(model, f"{zero},20%;{one},{share}%;cpu,*")
        studio.latent(placed)
        assert studio.world.allocated(one) == studio.planned(placed)[one]
        assert studio.world.pinned_bytes() == studio.planned(placed)["cpu"] or studio.kind != "cuda"


def test_clone_of_a_clone_keeps_the_plan_after_its_parents_are_gone(studio: Studio) -> None:
    model = studio.flux()
    stock = studio.latent(model)
    grandchild = studio.place(model).clone().clone()
    del model
    studio.unload()
    gc.collect()
    assert torch.equal(studio.latent(grandchild), stock)
    assert studio.resting(grandchild) == studio.planned(grandchild)


@pytest.mark.accelerator
def test_deep_clone_for_another_device_has_no_plan(studio: Studio) -> None:
    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    elsewhere = studio.place(model).deepclone_multigpu(torch.device(studio.accelerators[1]))
    assert elsewhere.placed is None
    assert torch.equal(studio.latent(elsewhere), stock)
    assert set(studio.resting(elsewhere)) == {studio.accelerators[1]}


@pytest.mark.cuda
def test_cfg_split_over_two_devices(studio: Studio) -> None:
    from comfy.multigpu import create_multigpu_deepclones

    model, negative = studio.flux(), studio.conditions()
    negative[0][0] = -negative[0][0]

    def draw(patcher: Any) -> torch.Tensor:
        split = create_multigpu_deepclones(patcher, max_gpus=2)
        return studio.latent(split, negative=negative, cfg=3.0)

    stock = draw(model)
    studio.unload()
    placed = studio.place(model, f"{studio.accelerators[0]},40%;cpu,*")
    assert torch.equal(draw(placed), stock)
    assert studio.resting(placed) == studio.planned(placed)


def test_the_model_goes_when_its_patchers_go(studio: Studio) -> None:
    placed = studio.lora(studio.place(studio.flux()), 0.4)
    studio.latent(placed)
    inner = weakref.ref(placed.model)
    del placed
    gc.collect()
    assert inner() is None, "at once"
    studio.settle()
    if studio.simulated:
        assert studio.world.pinned_bytes() == 0, "by the end of the prompt"


@pytest.mark.accelerator
def test_a_text_encoder_read_again_leaves_no_dead_entry(studio: Studio) -> None:
    """The host's loader loads a text encoder at once, by a patcher that is gone when only its model is taken."""
    import comfy.model_management as memory

    from multigpu.host.placing.device_scope import DeviceScope
    from multigpu.host.placing.other_device import retargeted

    clip = studio.clip()
    for device in ("cpu", studio.accelerators[1]):
        own = retargeted(clip.patcher, torch.device(device), DeviceScope())
        assert own.model is not clip.patcher.model
        assert [entry for entry in memory.current_loaded_models if entry.is_dead()] == []
        assert own.loaded_size() == 0


@pytest.mark.accelerator
def test_room_is_made_on_a_donor(studio: Studio) -> None:
    import comfy.model_management as memory

    zero, one, _ = studio.accelerators
    bystander = studio.flux()
    bystander.load_device = torch.device(one)
    memory.load_models_gpu([bystander])
    held = studio.world.allocated(one)
    assert held > 30 << 20
    plan = f"{zero},10%;{one},*"
    placed = studio.place(studio.flux(), plan)
    studio.world.limit(one, held + (20 << 20))
    studio.latent(placed)
    assert studio.resting(placed) == studio.planned(placed)
    assert studio.resting(bystander)["cpu"] > 0


@pytest.mark.accelerator
def test_what_is_loaded_along_stays_on_the_donor(studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    """As a ControlNet on the donor is: the weights that have no room beside it rest in RAM, with a warning."""
    import comfy.model_management as memory

    zero, one, _ = studio.accelerators
    model, along = studio.flux(), studio.flux()
    stock = studio.latent(model)
    studio.unload()
    along.load_device = torch.device(one)
    placed = studio.place(model, f"{zero},10%;{one},*")
    memory.load_models_gpu([along])
    studio.world.limit(one, studio.world.allocated(one) + memory.minimum_inference_memory() + (20 << 20))
    for _ in range(2):
        memory.load_models_gpu([placed, along])
        assert set(studio.resting(along)) == {one}
        resting = studio.resting(placed)
        assert resting[one] > 10 << 20 and resting["cpu"] > 10 << 20
    assert f"{one} has" in caplog.text and "less free memory than the plan needs" in caplog.text
    studio.world.limit(one, 6 << 30)
    assert torch.equal(studio.latent(placed), stock)
    assert studio.resting(placed) == studio.planned(placed), "with the room the plan is carried out"


@pytest.mark.accelerator
def test_two_models_share_a_donor_that_computes_for_a_third(studio: Studio) -> None:
    zero, one, _ = studio.accelerators
    first, second, third = studio.flux(), studio.flux(), studio.flux()
    stock = studio.latent(first)
    studio.unload()
    placed = [studio.place(first, f"{zero},30%;{one},*"), studio.place(second, f"{zero},50%;{one},*")]
    third.load_device = torch.device(one)
    third = studio.place(third, f"{one},40%;{zero},30%;cpu,*")
    for patcher in (*placed, third, *placed):
        assert torch.equal(studio.latent(patcher), stock)
        assert studio.resting(patcher) == studio.planned(patcher)


def test_no_host_function_is_replaced(studio: Studio) -> None:
    import comfy.model_management
    import comfy.model_patcher
    import comfy.ops

    def functions() -> dict[str, Any]:
        owners = (comfy.model_management, comfy.ops, comfy.model_patcher, comfy.model_patcher.ModelPatcher)
        return {
            f"{owner.__name__}.{name}": value
            for owner in owners
            for name, value in vars(owner).items()
            if inspect.isfunction(value) or inspect.isclass(value)
        }

    before = functions()
    studio.latent(studio.lora(studio.place(studio.flux()), 0.5))
    after = functions()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []


@pytest.mark.accelerator
def test_a_placement_that_was_not_applied_is_an_error(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.errors import PlacementNotApplied
    from multigpu.host.engine import placed_loading

    monkeypatch.setattr(placed_loading, "in_file", lambda tensor: tensor.device.type == "cpu")
    placed = studio.place(studio.flux())
    with pytest.raises(PlacementNotApplied, match="were counted"):
        studio.latent(placed)
    monkeypatch.undo()
    assert studio.latent(placed).isfinite().all()
