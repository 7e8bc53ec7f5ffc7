"""Weights that are pages of their model file: they are read from there, rest there, and are known to be there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio

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
