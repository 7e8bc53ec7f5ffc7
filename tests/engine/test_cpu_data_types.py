"""The CPU computes with weights on an accelerator, in every data type in which they may be stored.

For the CPU a component may be read again in another data type. Plan, load and count agree on that one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pack import Pack, decoded, patcher_of, resting, text
from tests.engine.studio import Studio
from tests.engine.test_quantised import quantised_file

FILES = {
    "model": "diffusion_models/toy_flux.safetensors", "clip": "text_encoders/toy_clip_l.safetensors",
    "vae": "vae/toy_taef1.safetensors",
}  # fmt: skip
SAVED = {
    "model": ["float16", "float32"],
    "clip": ["bfloat16", "float32", "float8_e4m3fn"],
    "vae": ["float16", "bfloat16"],
}
"""Data types of files, beside those of the tiny models (bfloat16, float16, float32), which are tested elsewhere."""


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


def draws_the_same_from_an_accelerator(studio: Studio, pack: Pack, part: str, given: Any) -> None:
    use = {"model": studio.latent, "clip": text, "vae": decoded}[part]
    node = f"MultiGPUPlace{ {'model': 'Model', 'clip': 'CLIP', 'vae': 'VAE'}[part] }"
    whole = use(pack.one(node, **{part: given}, compute_device="cpu"))
    device = studio.accelerators[1]
    spread = {"mode": "expert", "expert_mode_allocations": f"{device},50%;cpu,*"}
    placed = pack.one(node, **{part: given}, compute_device="cpu", **spread)
    found = resting(placed)
    assert found == studio.planned(patcher_of(placed)) and found.keys() == {device, "cpu"}
    assert torch.equal(use(placed), whole)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_chosen_in_the_loader(studio: Studio, pack: Pack, storage: str) -> None:
    draws_the_same_from_an_accelerator(studio, pack, "model", studio.flux(storage))


@pytest.mark.parametrize(("part", "dtype"), [(part, dtype) for part, dtypes in SAVED.items() for dtype in dtypes])
def test_the_data_type_of_the_file(studio: Studio, pack: Pack, saved: Path, part: str, dtype: str) -> None:
    name = f"{dtype}.safetensors"
    tensors = load_file(studio.models / FILES[part])
    there = {key: tensor.to(getattr(torch, dtype)) if tensor.dim() else tensor for key, tensor in tensors.items()}
    save_file(there, saved / FILES[part].partition("/")[0] / name)
    if part == "clip":
        import nodes

        given = nodes.CLIPLoader().load_clip(name, "sd3")[0]
    else:
        given = studio.flux(name=name) if part == "model" else studio.vae(name)
    draws_the_same_from_an_accelerator(studio, pack, part, given)


def test_quantised_weights(studio: Studio, pack: Pack, saved: Path) -> None:
    path = quantised_file(studio, "float8_e4m3fn", saved / "diffusion_models" / "quantised.safetensors")
    draws_the_same_from_an_accelerator(studio, pack, "model", studio.flux(name=path.name))
