"""Patchers of other packs, placed: whatever their code does, the plan holds, and the picture is the unplaced one.

The packs are written here; the product knows none of them by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.engine.pack import Pack
from tests.engine.studio import Studio


@pytest.fixture
def quantised(studio: Studio) -> Any:
    from tests.packs.quantised_pack import patcher

    return patcher.load(str(studio.models / "diffusion_models" / "toy_flux.safetensors"))


def sampling(model: Any) -> Any:
    """A node that clones the model and patches an object of it."""
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    return ModelSamplingFlux().patch(model, 1.15, 0.5, 64, 64)[0]


def check(studio: Studio, model: Any, want: torch.Tensor) -> None:
    """`model` is placed, draws `want`, and its bytes rest where its plan says; again after it was unloaded."""
    for _ in range(2):
        assert torch.equal(studio.latent(model), want)
        resting, planned = studio.resting(model), studio.planned(model)
        assert resting.keys() == planned.keys()
        assert all(abs(resting[device] - planned[device]) < 1 << 16 for device in planned), (resting, planned)
        studio.unload()


def test_a_pack_s_patcher_and_every_clone_of_it_stays_placed(studio: Studio, quantised: Any) -> None:
    want, other = studio.latent(quantised), studio.latent(sampling(quantised))
    assert not torch.equal(want, other)
    studio.unload()
    placed = studio.place(quantised)
    check(studio, placed, want)
    check(studio, sampling(placed), other)
    check(studio, placed.clone().clone(), want)
    assert torch.equal(studio.latent(quantised), want), "the unplaced patcher of the same model"


@pytest.mark.parametrize("before", [True, False], ids=["LoRA, place", "place, LoRA"])
def test_a_lora_that_a_pack_s_tensors_carry(studio: Studio, quantised: Any, before: bool) -> None:
    """The pack applies it when a weight is used. Its bytes are not changed, and no second copy of them is kept."""
    bare, strong = studio.latent(quantised), studio.latent(studio.lora(quantised, 0.8))
    weak = studio.latent(studio.lora(quantised, 0.3))
    assert not torch.equal(bare, strong) and not torch.equal(weak, strong)
    studio.unload()
    placed = studio.place(quantised)

    def with_lora(strength: float) -> Any:
        return studio.place(studio.lora(quantised, strength)) if before else studio.lora(placed, strength)

    check(studio, with_lora(0.8), strong)
    check(studio, with_lora(0.3), weak)
    one, two = with_lora(0.8), with_lora(0.3)
    for model, want in ((one, strong), (two, weak), (placed, bare), (one, strong), (quantised, bare), (two, weak)):
        assert torch.equal(studio.latent(model), want)
    assert torch.equal(studio.latent(studio.lora(quantised, 0.8)), strong), "an unplaced patcher with the LoRA"
    check(studio, sampling(one), studio.latent(sampling(studio.lora(quantised, 0.8))))


def test_a_patcher_that_lost_its_class_is_refused_when_it_is_loaded(studio: Studio) -> None:
    """Made in a way that no code of ours sees: a copy of its attributes in an object of another class."""
    from comfy.model_patcher import ModelPatcher

    from multigpu.errors import PlacementNotApplied

    class Stranger(ModelPatcher):
        pass

    placed = studio.place(studio.flux())
    want = studio.latent(placed)
    lost = copy.copy(placed)
    lost.__class__ = Stranger
    with pytest.raises(PlacementNotApplied, match="Flux was placed, but a later node made a Stranger of it"):
        studio.latent(lost)
    check(studio, placed, want)


def test_a_clone_made_from_nothing_is_placed(studio: Studio) -> None:
    """A pack's `clone` that makes a new patcher, without the attachments and callbacks of the old one."""
    from comfy.model_patcher import ModelPatcher

    class Fresh(ModelPatcher):
        def clone(self, *arguments: Any, **named: Any) -> Any:
            made = Fresh(self.model, self.load_device, self.offload_device)
            made.patches, made.patches_uuid = dict(self.patches), self.patches_uuid
            return made

    model = studio.flux()
    static = studio.place(model)
    model = Fresh(static.model, static.load_device, static.offload_device)
    want = studio.latent(model)
    studio.unload()
    placed = studio.place(model)
    check(studio, placed, want)
    check(studio, placed.clone(), want)


@pytest.mark.accelerator
@pytest.mark.parametrize("other_vram", [True, False])
def test_the_oldest_nodes_fill_the_other_accelerators_or_ram(
    studio: Studio, pack: Pack, monkeypatch: pytest.MonkeyPatch, other_vram: bool
) -> None:
    import nodes

    from multigpu.nodes.packs import pack_nodes
    from tests.packs.quantised_pack import UnetLoader

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "UnetLoaderGGUF", UnetLoader)
    made = {node.__name__: node for node in pack_nodes(pack.runtime)}
    assert made.keys() == {f"UnetLoaderGGUF{kind}MultiGPU" for kind in ("", "DisTorch2", "DisTorch")}
    zero, one, _ = studio.accelerators
    widgets = {"unet_name": "toy_flux.safetensors", "device": zero, "virtual_vram_gb": 0.005}
    (model,) = made["UnetLoaderGGUFDisTorchMultiGPU"].execute(**widgets, use_other_vram=other_vram).result
    studio.latent(model)
    assert studio.resting(model).keys() == {zero, one if other_vram else "cpu"}
