"""Loader nodes whose models cannot be made small: only the host's own loading call is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.pack import Pack, patcher_of, small_vision
from tests.engine.studio import Studio

CLIP = "toy_clip_l.safetensors"
NAMES = {f"clip_name{number}": CLIP for number in range(1, 5)}


def names(count: int) -> dict[str, str]:
    return dict([*NAMES.items()][:count])


@pytest.fixture
def one_small_encoder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host's loading call reads the first file only; how many it was given is recorded."""
    import comfy.sd

    real, given = comfy.sd.load_clip, []

    def load_clip(ckpt_paths: list[str], **options: Any) -> Any:
        given.append(len(ckpt_paths))
        return real(ckpt_paths[:1], **{**options, "clip_type": comfy.sd.CLIPType.SD3})

    monkeypatch.setattr(comfy.sd, "load_clip", load_clip)
    return given


@pytest.mark.parametrize("variant", ["MultiGPU", "DisTorch2MultiGPU"])
@pytest.mark.parametrize(
    ("loader", "inputs"),
    [
        ("DualCLIPLoader", {**names(2), "type": "flux"}),
        ("TripleCLIPLoader", names(3)),
        ("QuadrupleCLIPLoader", names(4)),
    ],
)
def test_text_encoders_of_several_files(
    studio: Studio, pack: Pack, one_small_encoder: list[int], loader: str, inputs: dict[str, str], variant: str
) -> None:
    for device in [*studio.accelerators[1:2], "cpu"]:
        clip = pack.one(f"{loader}{variant}", **inputs, device=device)
        assert str(clip.patcher.load_device) == device
        assert one_small_encoder.pop() == len([name for name in inputs if name.startswith("clip_name")])


@pytest.mark.parametrize("variant", ["MultiGPU", "DisTorch2MultiGPU"])
def test_clip_vision(studio: Studio, pack: Pack, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    import comfy.clip_vision
    import folder_paths

    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda kind, name: name)
    monkeypatch.setattr(comfy.clip_vision, "load", lambda path: small_vision())
    for device in [*studio.accelerators[1:2], "cpu"]:
        vision = pack.one(f"CLIPVisionLoader{variant}", clip_name="vit.safetensors", device=device)
        assert str(vision.load_device) == str(vision.patcher.load_device) == device


@pytest.mark.parametrize("variant", ["MultiGPU", "DisTorch2MultiGPU"])
def test_diffusers_folders(studio: Studio, pack: Pack, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    import comfy.diffusers_load

    monkeypatch.setattr(comfy.diffusers_load, "load_diffusers", lambda *given, **options: studio.sd15())
    device = studio.accelerators[1] if studio.simulated else "cpu"
    name = "device" if variant == "MultiGPU" else "compute_device"
    parts = pack.run(f"DiffusersLoader{variant}", model_path="a folder", **{name: device})
    assert [str(patcher_of(part).load_device) for part in parts] == [device] * 3
