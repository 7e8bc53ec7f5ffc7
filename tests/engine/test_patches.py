"""LoRAs and hooks on a placed model: right, exactly undone, and cheap to change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio


def unpatched(model: Any) -> dict[str, torch.Tensor]:
    return {key: value.cpu().clone() for key, value in model.model.state_dict().items()}


def test_lora_on_changed_and_off(studio: Studio) -> None:
    model = studio.flux()
    stock = studio.latent(model)
    strong, weak = studio.latent(studio.lora(model, 0.8)), studio.latent(studio.lora(model, 0.3))
    assert not torch.equal(stock, strong) and not torch.equal(strong, weak)
    studio.unload()
    before = unpatched(model)
    placed = studio.place(model)
    with_strong, with_weak = studio.lora(placed, 0.8), studio.lora(placed, 0.3)
    assert torch.equal(studio.latent(with_strong), strong)
    assert torch.equal(studio.latent(with_weak), weak)
    assert torch.equal(studio.latent(placed), stock)
    assert torch.equal(studio.latent(with_strong), strong)
    studio.unload()
    after = unpatched(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(studio.latent(with_weak), weak)


def test_two_loras_at_once(studio: Studio) -> None:
    model = studio.flux()
    stock = studio.latent(studio.lora(studio.lora(model, 0.5), 0.2))
    studio.unload()
    assert torch.equal(studio.latent(studio.lora(studio.lora(studio.place(model), 0.5), 0.2)), stock)


def test_originals_are_kept_in_the_file_not_in_memory(studio: Studio) -> None:
    from multigpu.stream.originals import FileOriginal

    placed = studio.lora(studio.place(studio.flux()), 0.8)
    studio.latent(placed)
    assert placed.backup and all(isinstance(original, FileOriginal) for original in placed.backup.values())


def test_originals_that_no_file_holds_are_kept_in_memory(studio: Studio) -> None:
    model = studio.flux()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.data = parameter * 1.5
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.place(model)
    assert torch.equal(studio.latent(studio.lora(placed, 0.8)), patched)
    assert torch.equal(studio.latent(placed), stock)


def test_a_change_touches_only_patched_blocks(studio: Studio) -> None:
    placed = studio.place(studio.flux())
    studio.latent(placed)
    state = studio.states.of(placed)
    written: list[str] = []
    rewrite = state.residence.rewrite
    state.residence.rewrite = lambda block, *rest, **how: (written.append(block), rewrite(block, *rest, **how))  # type: ignore[method-assign,func-returns-value]
    patched = studio.lora(placed, 0.5)
    studio.latent(patched)
    assert sorted(written) == sorted(key.rpartition(".")[0] for key in patched.patches)


def test_a_file_that_changed_cannot_give_originals_back(studio: Studio, tmp_path: Path) -> None:
    import comfy.sd

    from multigpu.errors import HostError

    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    placed = studio.place(comfy.sd.load_diffusion_model(str(file)))
    studio.latent(studio.lora(placed, 0.8))
    with file.open("ab") as grown:
        grown.write(b" ")
    studio.unload()
    assert set(studio.resting(placed)) == {"cpu"}
    with pytest.raises(HostError, match="changed on disk"):
        studio.latent(placed)


def hooked(studio: Studio, strength: float) -> list[Any]:
    """Conditions that carry a LoRA as a weight hook."""
    import comfy.hooks
    import comfy.utils

    lora = comfy.utils.load_torch_file(str(studio.models / "loras" / "toy_flux_lora.safetensors"), safe_load=True)
    hooks = comfy.hooks.create_hook_lora(lora=lora, strength_model=strength, strength_clip=0.0)
    return comfy.hooks.set_hooks_for_conditioning(studio.conditions(), hooks)


def test_weight_hooks_change_weights_between_steps(studio: Studio) -> None:
    """The same conditions with and without a hook in one batch: the weights change twice in every step."""
    model = studio.flux()
    both = {"positive": hooked(studio, 0.7), "negative": studio.conditions(), "cfg": 2.0}
    stock = studio.latent(model, **both)
    assert not torch.equal(stock, studio.latent(model, negative=studio.conditions(), cfg=2.0))
    studio.unload()
    placed = studio.place(model)
    ours = studio.latent(placed, **both)
    if studio.simulated:  # the host computes a hook's patch on the device where the weight rests
        assert torch.allclose(ours, stock, atol=0.05 * float(stock.abs().max()))
    else:
        assert torch.equal(ours, stock)
    assert torch.equal(studio.latent(placed), studio.latent(studio.flux()))


def test_weight_wrappers_see_the_staged_weight(studio: Studio) -> None:
    model = studio.flux()
    key = "diffusion_model.single_blocks.0.linear1.weight"

    def wrapped(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.add_weight_wrapper(key, lambda weight: weight * 0.5)
        return clone

    stock = studio.latent(wrapped(model))
    studio.unload()
    placed = studio.place(model)
    assert torch.equal(studio.latent(wrapped(placed)), stock)
    assert not torch.equal(studio.latent(placed), stock)
