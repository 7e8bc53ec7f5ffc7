"""Weights that are pages of their model file: they are read from there, rest there, and are known to be there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio
from tests.engine.test_quantised import LAYOUTS, quantised_file

pytestmark = pytest.mark.pages


def in_pages(studio: Studio, patcher: Any) -> list[bool]:
    """Of each weight that came from the pages of the file, whether it is there now."""
    from multigpu.host.engine.blocks import split

    pages = studio.states.of(patcher).pages
    found = [pages.holding(*split(key)) is not None for key in pages]
    assert len(found) > 50
    return found


def test_a_free_copies_nothing_and_a_load_reads_the_file(studio: Studio) -> None:
    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux())
    for _ in range(3):
        assert torch.equal(studio.latent(placed), want)
        assert not any(in_pages(studio, placed))
        studio.unload()
        resting = in_pages(studio, placed)
        assert all(weight.device.type == "cpu" for weight in placed.model.parameters())
        assert any(resting) and not all(resting), "what rested in RAM stays in its arena"


def test_the_originals_of_a_lora_are_known_without_comparing(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.stream import originals
    from multigpu.stream.pages import Page

    model = studio.flux()
    want = [studio.latent(model), studio.latent(studio.lora(model, 0.8)), studio.latent(studio.lora(model, 0.3))]
    studio.unload()
    monkeypatch.setattr(originals, "_holds", None)  # what would compare
    placed = studio.place(studio.flux())
    patchers = [placed, studio.lora(placed, 0.8), studio.lora(placed, 0.3)]
    for index in (0, 1, 2, 1, 0, 2, 0):
        assert torch.equal(studio.latent(patchers[index]), want[index])
        assert all(isinstance(original.file, Page) for original in placed.backup.values())
    studio.latent(patchers[1])
    studio.unload()
    assert torch.equal(studio.latent(patchers[2]), want[2])
    studio.unload()
    assert any(in_pages(studio, placed)) and not placed.backup


def test_what_other_code_has_written_on_the_device_is_not_lost(studio: Studio) -> None:
    placed = studio.place(studio.flux())
    before = studio.latent(placed)
    state = studio.states.of(placed)
    key = next(key for key in state.pages if state.weight(key).device == placed.load_device)
    with torch.inference_mode(False), torch.no_grad():
        state.weight(key).mul_(3)
    changed = state.weight(key).cpu()
    want = studio.latent(placed)
    assert not torch.equal(want, before)
    studio.unload()
    assert torch.equal(state.weight(key), changed)
    assert torch.equal(studio.latent(placed), want)


def test_a_file_that_was_overwritten_is_not_mixed_with_what_is_in_memory(studio: Studio, tmp_path: Path) -> None:
    import comfy.sd

    from multigpu.errors import HostError

    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    model = comfy.sd.load_diffusion_model(str(file))
    placed = studio.place(model)
    want = studio.latent(placed)
    contents = file.read_bytes()
    file.write_bytes(contents)
    assert torch.equal(studio.latent(placed), want), "what is loaded needs no file"
    studio.unload()
    assert torch.equal(studio.latent(placed), want), "its weights were copied to RAM, as they were"
    studio.unload()
    again = studio.place(comfy.sd.load_diffusion_model(str(file)))
    studio.latent(again)
    studio.unload()
    file.write_bytes(contents)
    with pytest.raises(HostError, match=r"has changed on disk since it was loaded.*Unload Models and Execution Cache"):
        studio.latent(again)


def wan_lora(model: Any, seed: int, strength: float) -> Any:
    """`model` with a LoRA on every matrix of its blocks."""
    import comfy.sd

    random, tensors = torch.Generator().manual_seed(seed), {}
    for key, weight in model.model.state_dict().items():
        if ".blocks." in key and weight.dim() == 2:
            name = key.removesuffix(".weight")
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=random) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=random) * 0.1
    return comfy.sd.load_lora_for_models(model, None, tensors, strength, 0)[0]


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_weights_of_another_type_of_16_bits_stay_in_their_file_until_they_are_used(studio: Studio, home: str) -> None:
    """ComfyUI computes Wan in fp16; this file has bf16."""

    def draw(model: Any) -> torch.Tensor:
        return studio.latent(model, words, empty=torch.zeros(1, 16, 2, 8, 8), steps=3)

    words = studio.text(studio.clip(), "a house")
    alone = studio.wan()
    loras = [lambda model: model, lambda model: wan_lora(model, 1, 0.7), lambda model: wan_lora(model, 2, 0.4)]
    want = [draw(lora(alone)) for lora in loras]
    assert not torch.equal(want[0], want[1])
    assert {weight.dtype for key, weight in alone.model.named_parameters() if "ffn" in key} == {torch.float16}
    del alone
    studio.unload()
    model = studio.wan()
    stored = {key: weight.dtype for key, weight in model.model.named_parameters()}
    assert stored["diffusion_model.blocks.0.ffn.0.weight"] == torch.bfloat16, "nothing was cast"
    placed = studio.place(model, f"{studio.accelerators[0]},40%;{home},*")
    del model
    patchers = [lora(placed) for lora in loras]
    for index in (0, 1, 2, 0, 1, 1, 0):
        assert torch.equal(draw(patchers[index]), want[index])
        assert studio.proven(placed) == studio.planned(placed)
    studio.unload()
    assert torch.equal(draw(patchers[1]), want[1])
    studio.unload()
    assert {key: weight.dtype for key, weight in placed.model.named_parameters()} == stored


def plain_fp8(studio: Studio, target: Path) -> Path:
    """The tiny Flux with its blocks in 8 bits, without scales."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(studio.models / "diffusion_models" / "toy_flux.safetensors")
    for name in (name for name in tensors if "_blocks." in name):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, target)
    return target


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["plain", *LAYOUTS])
def test_weights_of_8_bits_and_fewer_come_from_their_file_and_rest_there(
    studio: Studio, tmp_path: Path, kind: str, home: str
) -> None:
    import comfy.sd

    from multigpu.stream.originals import FileOriginal

    file = tmp_path / "model.safetensors"
    _ = plain_fp8(studio, file) if kind == "plain" else quantised_file(studio, kind, file)
    options = {"dtype": torch.float8_e4m3fn} if kind == "plain" else {}
    model = comfy.sd.load_diffusion_model(str(file), model_options=options)
    want = [studio.latent(studio.lora(model, strength)) for strength in (0, 0.8, 0.3)]
    assert not torch.equal(want[0], want[1])
    del model
    studio.unload()
    placed = studio.place(
        comfy.sd.load_diffusion_model(str(file), model_options=options), f"{studio.accelerators[0]},40%;{home},*"
    )
    state = studio.states.of(placed)
    linear = {f"diffusion_model.single_blocks.{number}.linear1" for number in range(4)}
    assert linear <= state.in_pages() and (linear <= state.in_file()) == (kind != "nvfp4"), "its scales are in RAM"
    patchers = [placed, studio.lora(placed, 0.8), studio.lora(placed, 0.3)]
    for index in (0, 1, 2, 0, 1):
        assert torch.equal(studio.latent(patchers[index]), want[index])
        found, planned = studio.proven(placed), studio.planned(placed)
        assert found["disk"] + found.get("cpu", 0) == planned["disk"] if "disk" in planned else found == planned
        assert all(isinstance(original, FileOriginal) for original in placed.backup.values()), "nothing is kept in RAM"
    studio.latent(patchers[1])
    studio.unload()
    assert not placed.backup and linear <= state.in_pages()
    assert torch.equal(studio.latent(patchers[2]), want[2])
