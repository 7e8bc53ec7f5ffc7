"""One model, several patchers of it: placed, unplaced, with and without LoRAs, in any order.

What one patcher does to the weights must never show in the result of another, and no memory may stay in use. Results
are compared with those of unplaced patchers.
"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import HOST_TABLES
from tests.engine.studio import Studio


@pytest.fixture
def own_file(studio: Studio, tmp_path: Path) -> Path:
    """A model file that a test may change."""
    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    return file


def load(file: Path) -> Any:
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(file))


def text(clip: Any) -> torch.Tensor:
    return clip.encode_from_tokens_scheduled(clip.tokenize("a house by the sea"))[0][0].cpu()


def clip_with_lora(clip: Any, strength: float) -> Any:
    """One weight of a text encoder, changed as a LoRA would."""
    patched = clip.clone()
    key = next(k for k in clip.patcher.model_state_dict() if k.endswith("layers.3.mlp.fc1.weight"))
    weight = clip.patcher.model_state_dict()[key]
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1
    patched.patcher.add_patches({key: ("diff", (change,))}, strength)
    return patched


def left(studio: Studio) -> dict[str, int]:
    """Bytes that are allocated on accelerators, and pinned."""
    if studio.world is None:
        return {}
    allocated = {device: studio.world.allocated(device) for device in studio.accelerators}
    used = {device: count for device, count in allocated.items() if count > HOST_TABLES}
    return {**used, "pinned": studio.world.pinned_bytes()}


NOTHING = {"pinned": 0}


def test_an_unplaced_patcher_between_two_placed_runs(studio: Studio) -> None:
    """The unplaced run is without the LoRA of the placed patcher, and the next placed run has it again."""
    model = studio.flux()
    with_lora = studio.lora(model, 0.8)
    stock, patched, weak = studio.latent(model), studio.latent(with_lora), studio.latent(studio.lora(model, 0.3))
    studio.unload()
    placed = studio.place(with_lora)
    assert torch.equal(studio.latent(placed), patched)
    assert torch.equal(studio.latent(model), stock)
    studio.unload()
    assert torch.equal(studio.latent(placed), patched)
    assert torch.equal(studio.latent(model), stock)
    studio.unload()
    assert torch.equal(studio.latent(studio.place(studio.lora(model, 0.3))), weak)
    assert torch.equal(studio.latent(with_lora), patched), "an unplaced patcher with the very same patches"
    assert torch.equal(studio.latent(placed), patched)


def test_an_unplaced_text_encoder_between_two_placed_runs(studio: Studio) -> None:
    clip = studio.clip()
    with_lora = clip_with_lora(clip, 0.8)
    stock, patched = text(clip), text(with_lora)
    assert not torch.equal(stock, patched)
    studio.unload()
    placed = studio.place_clip(with_lora)
    assert torch.equal(text(placed), patched)
    assert torch.equal(text(clip), stock)
    studio.unload()
    assert torch.equal(text(placed), patched)


@pytest.mark.accelerator
def test_a_copy_for_another_device_knows_its_own_size(studio: Studio) -> None:
    """The host's CFG split copies the model. The copy has no plan, so it must report the size of the whole model."""
    model = studio.flux()
    whole = model.model_size()
    placed = studio.place(model, "cpu,*")
    copy = placed.deepclone_multigpu(torch.device(studio.accelerators[1]))
    assert copy.model_size() == whole
    assert placed.clone().model_size() == placed.model_size() < whole


def test_a_merge_does_not_see_later_loras(studio: Studio) -> None:
    """Weights that `get_key_patches` has returned, and that a merge uses, keep their contents."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    model, other = studio.flux(), studio.flux()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.data = parameter * 0.9

    def merged(source: Any) -> Any:
        return ModelMergeSimple().merge(other, source, 0.5)[0]

    stock = studio.latent(merged(model))
    patched = studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.place(model)
    studio.latent(placed)
    for source in (placed, model):
        merge = merged(source)
        assert torch.equal(studio.latent(studio.lora(placed, 0.8)), patched)
        assert torch.equal(studio.latent(merge), stock)
        studio.latent(placed)
        assert torch.equal(studio.latent(merge), stock)


@pytest.mark.accelerator
def test_a_merge_holds_no_memory_of_whole_blocks(studio: Studio) -> None:
    """It is handed the biases as they rest on the donor, and the weights, which a LoRA has changed, from the file."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    model = studio.flux()
    donor = studio.accelerators[1]
    placed = studio.place(model, f"{donor},60%;cpu,*")
    studio.latent(studio.lora(placed, 0.8))
    before = studio.world.allocated(donor)
    merge = ModelMergeSimple().merge(studio.lora(placed, 0.8), model, 0.5)[0]
    studio.latent(placed)
    assert studio.world.allocated(donor) < 1.2 * before
    del merge


@pytest.mark.accelerator
@pytest.mark.parametrize("then", ["unplaced", "dropped", "placed elsewhere"])
def test_a_parameter_that_somebody_holds_keeps_no_memory_of_its_block(studio: Studio, then: str) -> None:
    """When the block leaves its donor, the parameter goes with it, or stays there alone where torch cannot move it."""
    model = studio.flux()
    donor = studio.accelerators[1]
    placed = studio.place(model, f"{donor},60%;cpu,*")
    studio.latent(placed)
    held = [each for each in model.model.parameters() if str(each.device) == donor and each.ndim == 1]
    assert held
    if then == "dropped":
        del placed
    studio.latent(studio.place(model, "cpu,30%") if then == "placed elsewhere" else model)
    studio.settle()
    rounding = 512 * len(held)  # torch's allocator hands out multiples of so many bytes
    assert studio.world.allocated(donor) <= HOST_TABLES + rounding + sum(each.nbytes for each in held)


@pytest.mark.accelerator
def test_freeing_memory_of_a_model_whose_placed_patcher_is_gone(studio: Studio) -> None:
    """Another one exists that has not loaded it yet, as after a change of the place node's widgets."""
    import comfy.model_management as memory

    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    compute, donor, _ = studio.accelerators
    first = studio.place(model, f"{compute},60%;{donor},30%;cpu,*")
    studio.latent(first)
    second = studio.place(model, f"{donor},60%;cpu,*")
    del first
    studio.settle()
    before = {device: studio.world.allocated(device) for device in (compute, donor)}
    memory.free_memory(memory.get_free_memory(torch.device(compute)) + (5 << 20), torch.device(compute))
    assert before[compute] - studio.world.allocated(compute) >= 5 << 20
    assert studio.world.allocated(donor) == before[donor], "nobody needed memory there"
    assert torch.equal(studio.latent(second), stock)


@pytest.mark.accelerator
def test_nothing_stays_behind_when_an_unplaced_patcher_takes_over(studio: Studio) -> None:
    """The donor is empty as soon as an unplaced patcher has loaded the model, and all devices are after an unload."""
    model = studio.flux()
    compute, donor, _ = studio.accelerators
    placed = studio.place(studio.lora(model, 0.8), f"{donor},60%;cpu,*")
    studio.latent(placed)
    assert studio.world.allocated(donor) > 0
    studio.latent(model)
    assert set(left(studio)) == {compute, "pinned"} and studio.world.allocated(donor) <= HOST_TABLES
    studio.unload()
    assert left(studio) == NOTHING


@pytest.mark.parametrize("how", ["touched", "replaced"])
def test_originals_of_a_file_that_was_replaced(studio: Studio, own_file: Path, how: str) -> None:
    """The unplaced patcher draws without the LoRA, or raises an error that says why not; it never draws with it."""
    from multigpu.errors import HostError

    model = load(own_file)
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.place(studio.lora(model, 0.8))
    assert torch.equal(studio.latent(placed), patched)
    if how == "touched":
        os.utime(own_file)
    else:
        shutil.copy(studio.models / "diffusion_models" / "toy_wan.safetensors", own_file.with_suffix(".new"))
        os.replace(own_file.with_suffix(".new"), own_file)
    studio.unload()
    if how == "touched":
        for _ in range(2):
            with pytest.raises(HostError, match="changed on disk"):
                studio.latent(model)
            studio.unload()
        assert torch.equal(studio.latent(placed), patched), "what is in the weights is what it asks for"
    else:
        assert torch.equal(studio.latent(model), stock)
    studio.unload()
    assert set(studio.resting(placed)) == {"cpu"}


def test_a_patch_that_changes_a_weights_shape(studio: Studio) -> None:
    """Some LoRAs (Flux control) widen a layer: applied, removed and applied again, to streamed and resident blocks."""
    import comfy.weight_adapter

    model = studio.flux()
    keys = [f"diffusion_model.double_blocks.{n}.img_mlp.0.weight" for n in (0, 1, 2)]
    weight = model.model.get_submodule("diffusion_model.double_blocks.0.img_mlp.0").weight
    up, down = torch.randn(weight.shape[0], 4) * 0.1, torch.randn(4, weight.shape[1]) * 0.1
    lora = comfy.weight_adapter.LoRAAdapter(set(), (up, down, 4.0, None, None, list(weight.shape)))
    wide_up, wide = torch.randn(weight.shape[0] + 8, 4) * 0.1, [weight.shape[0] + 8, weight.shape[1]]
    wider = comfy.weight_adapter.LoRAAdapter(set(), (wide_up, down, 4.0, None, None, wide))

    def patched(patcher: Any, adapter: Any) -> Any:
        clone = patcher.clone()
        assert clone.add_patches(dict.fromkeys(keys, adapter), 0.5)
        return clone

    import comfy.model_management as memory

    stock, reshaped = studio.latent(model), studio.latent(patched(model, lora))
    studio.unload()
    placed = studio.place(model)
    for _ in range(2):
        assert torch.equal(studio.latent(patched(placed, lora)), reshaped)
        memory.load_models_gpu([patched(placed, wider)])
        for key in keys:
            module, _, _ = key.rpartition(".")
            assert placed.model.get_submodule(module).weight.shape[0] == weight.shape[0] + 8
        assert torch.equal(studio.latent(placed), stock)


def test_an_object_patch_that_wraps_a_block(studio: Studio) -> None:
    """While the patch is on, the model has another module in the block's place; the block's weights do not move."""

    class Wrap(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = torch.nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(part * self.scale.to(part) for part in self.inner(*args, **kwargs))

    def wrapped(patcher: Any) -> Any:
        clone = patcher.clone()
        name = "diffusion_model.double_blocks.0"
        clone.add_object_patch(name, Wrap(clone.get_model_object(name)))
        return clone

    model = studio.flux()
    stock, scaled = studio.latent(model), studio.latent(wrapped(model))
    assert not torch.equal(stock, scaled)
    studio.unload()
    placed = studio.place(model)
    assert torch.equal(studio.latent(wrapped(placed)), scaled)
    assert torch.equal(studio.latent(placed), stock)
    assert torch.equal(studio.latent(wrapped(placed)), scaled)
    studio.unload()
    assert set(studio.resting(placed)) == {"cpu"}
    patched, with_lora = studio.latent(studio.lora(model, 0.8)), studio.lora(placed, 0.8)
    assert not torch.equal(studio.latent(wrapped(with_lora)), scaled), "the LoRA is in the weights all the same"
    assert torch.equal(studio.latent(with_lora), patched)
    studio.unload()
    assert torch.equal(studio.latent(model), stock)


def test_a_changed_file_is_refused_every_time(studio: Studio, own_file: Path) -> None:
    """The error is raised on the second and third try, too."""
    from multigpu.errors import HostError

    model = load(own_file)
    key = "diffusion_model.single_blocks.0.linear1.weight"

    def one_key(patcher: Any, strength: float) -> Any:
        clone = patcher.clone()
        shape = patcher.model_state_dict()[key].shape
        change = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        clone.add_patches({key: ("diff", (change,))}, strength)
        return clone

    placed = studio.place(model)
    strong = one_key(placed, 0.8)
    before = studio.latent(strong)
    with own_file.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\1" * 64)
    for _ in range(3):
        with pytest.raises(HostError, match="changed on disk"):
            studio.latent(one_key(placed, 0.3))
    assert torch.equal(studio.latent(strong), before)


def test_a_changed_file_does_not_keep_a_model_from_being_unloaded(studio: Studio, own_file: Path) -> None:
    """The placed patcher that has loaded it is gone, and the host unloads the model with the unplaced one."""
    from multigpu.errors import HostError

    model = load(own_file)
    placed, other = studio.place(studio.lora(model, 0.8)), studio.place(model)
    studio.latent(placed)
    os.utime(own_file, ns=(os.stat(own_file).st_mtime_ns + 10**6,) * 2)
    del placed
    gc.collect()
    studio.unload()
    for unpatched in (model, other):
        with pytest.raises(HostError, match="changed on disk"):
            studio.latent(unpatched)


def test_a_placed_patcher_that_is_dropped(studio: Studio) -> None:
    """Its LoRA is removed from the weights, and the next placed patcher has its own."""
    model = studio.flux()
    stock, patched, weak = (studio.latent(m) for m in (model, studio.lora(model, 0.8), studio.lora(model, 0.3)))
    studio.unload()

    def with_lora(strength: float) -> torch.Tensor:
        return studio.latent(studio.place(studio.lora(model, strength)))

    for again, expected in ((0.8, patched), (0.3, weak)):
        assert torch.equal(with_lora(0.8), patched)
        gc.collect()
        studio.unload()
        assert torch.equal(with_lora(again), expected)
        gc.collect()
        assert torch.equal(studio.latent(model), stock)
        studio.unload()
    assert torch.equal(with_lora(0.8), patched)
    gc.collect()
    studio.unload()
    assert torch.equal(studio.latent(studio.place(model)), stock)


@pytest.mark.accelerator
def test_one_model_on_two_compute_devices_in_turn(studio: Studio) -> None:
    """On each device the weights hold the patches of the patcher that is loaded there."""
    model = studio.flux()
    stock, strong, weak = (studio.latent(m) for m in (model, studio.lora(model, 0.8), studio.lora(model, 0.3)))
    studio.unload()
    first, second, _ = studio.accelerators
    here = studio.place(studio.lora(model, 0.8), f"{first},30%;cpu,*")
    other = studio.lora(model, 0.3).clone()
    other.load_device = torch.device(second)
    there = studio.place(other, f"{second},30%;cpu,*")
    for _ in range(2):
        assert torch.equal(studio.latent(here), strong)
        assert torch.equal(studio.latent(there), weak)
        assert left(studio).get(first) is None
        studio.unload()
        assert torch.equal(studio.latent(here), strong)
    assert torch.equal(studio.latent(model), stock)


def test_a_placed_patcher_kept_alive_while_another_way_is_chosen(studio: Studio) -> None:
    """Placed with a LoRA, then loaded whole by the host with the same LoRA, then placed without it."""
    model = studio.flux()
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    studio.unload()
    alive = studio.place(studio.lora(model, 0.8))
    assert torch.equal(studio.latent(alive), patched)
    assert torch.equal(studio.latent(studio.lora(model, 0.8)), patched)
    studio.unload()
    assert torch.equal(studio.latent(studio.place(model)), stock)
    assert torch.equal(studio.latent(alive), patched)


def test_a_dropped_patcher_whose_file_has_changed_leaves_nothing_on_devices(studio: Studio, own_file: Path) -> None:
    """Its weights stay patched, because the originals are out of reach. Unplaced patchers of the model say so."""
    from multigpu.errors import HostError

    with_lora = studio.lora(load(own_file), 0.3)
    placed = studio.place(with_lora)
    studio.latent(placed)
    os.utime(own_file, ns=(os.stat(own_file).st_mtime_ns + 10**6,) * 2)
    del placed
    studio.settle()
    for _ in range(2):
        with pytest.raises(HostError, match="changed on disk"):
            studio.latent(with_lora)
        assert left(studio) in ({}, NOTHING)
