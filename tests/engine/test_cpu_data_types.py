"""The CPU computes with weights on an accelerator: every component, in every data type that its weights may have.

For the CPU a component may be read again in another data type. Plan, load and count agree on that one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pack import Pack, decoded, patcher_of, resting, small_vision, text
from tests.engine.studio import Studio
from tests.engine.test_place_nodes import sd15_latent
from tests.engine.test_quantised import LAYOUTS, quantised_file

NODES = {"model": "Model", "clip": "CLIP", "vae": "VAE", "control_net": "ControlNet", "clip_vision": "CLIPVision"}
FILES = {
    "model": "diffusion_models/toy_flux.safetensors", "clip": "text_encoders/toy_clip_l.safetensors",
    "vae": "vae/toy_taef1.safetensors", "control_net": "controlnet/toy_sd15_controlnet.safetensors",
}  # fmt: skip
ALL = ["bfloat16", "float16", "float32"]
SAVED = {"model": ALL, "clip": [*ALL, "float8_e4m3fn"], "vae": ALL, "control_net": ALL}
"""Data types of files."""


@pytest.fixture
def saved(studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the host, one for each part, in which a test may save files."""
    import folder_paths

    for file in FILES.values():
        kind = file.partition("/")[0]
        (tmp_path / kind).mkdir()
        paths, suffixes = folder_paths.folder_names_and_paths[kind]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, ([*paths, str(tmp_path / kind)], suffixes))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})  # pytest removes the folders after the test
    return tmp_path


def loaded(studio: Studio, part: str, name: str) -> Any:
    import nodes

    return {
        "model": lambda: studio.flux(name=name),
        "clip": lambda: nodes.CLIPLoader().load_clip(name, "sd3")[0],
        "vae": lambda: studio.vae(name),
        "control_net": lambda: nodes.ControlNetLoader().load_controlnet(name)[0],
    }[part]()


def used(studio: Studio, part: str, component: Any) -> torch.Tensor:
    return {
        "model": studio.latent,
        "clip": text,
        "vae": decoded,
        "control_net": lambda control: sd15_latent(studio, studio.sd15()[0], control),
        "clip_vision": lambda vision: vision.encode_image(torch.ones(1, 32, 32, 3))["image_embeds"].cpu(),
    }[part](component)


def draws_the_same_from_an_accelerator(studio: Studio, pack: Pack, part: str, given: Any) -> None:
    node = f"MultiGPUPlace{NODES[part]}"
    whole = used(studio, part, pack.one(node, **{part: given}, compute_device="cpu"))
    device = studio.accelerators[1]
    spread = {"mode": "expert", "expert_mode_allocations": f"{device},50%;cpu,*"}
    placed = pack.one(node, **{part: given}, compute_device="cpu", **spread)
    found = resting(placed)
    assert found == studio.planned(patcher_of(placed)) and found.keys() == {device, "cpu"}
    assert torch.equal(used(studio, part, placed), whole)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_chosen_in_the_loader(studio: Studio, pack: Pack, storage: str) -> None:
    draws_the_same_from_an_accelerator(studio, pack, "model", studio.flux(storage))


@pytest.mark.parametrize(("part", "dtype"), [(part, dtype) for part, dtypes in SAVED.items() for dtype in dtypes])
def test_the_data_type_of_the_file(studio: Studio, pack: Pack, saved: Path, part: str, dtype: str) -> None:
    name = f"{dtype}.safetensors"
    tensors = load_file(studio.models / FILES[part])
    there = {key: tensor.to(getattr(torch, dtype)) if tensor.dim() else tensor for key, tensor in tensors.items()}
    save_file(there, saved / FILES[part].partition("/")[0] / name)
    draws_the_same_from_an_accelerator(studio, pack, part, loaded(studio, part, name))


@pytest.mark.parametrize("dtype", ALL)
def test_the_data_type_of_a_clip_vision_model(studio: Studio, pack: Pack, dtype: str) -> None:
    """The host chooses it when it makes the model, whatever the file has."""
    vision = small_vision()
    vision.model.to(getattr(torch, dtype))
    draws_the_same_from_an_accelerator(studio, pack, "clip_vision", vision)


@pytest.mark.parametrize("quantisation", LAYOUTS)
def test_quantised_weights(studio: Studio, pack: Pack, saved: Path, quantisation: str) -> None:
    path = quantised_file(studio, quantisation, saved / "diffusion_models" / "quantised.safetensors")
    draws_the_same_from_an_accelerator(studio, pack, "model", studio.flux(name=path.name))
