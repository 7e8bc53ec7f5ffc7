"""Quantised weights travel as they are stored: values and scales, in the host's own tensor class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio

LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8E4M3Layout", "nvfp4": "TensorCoreNVFP4Layout"}


def quantised_file(studio: Studio, quantisation: str, target: Path, times: float = 1.0) -> Path:
    """The tiny Flux, its weights multiplied, with the linear layers of its blocks quantised, in the file format of
    ComfyUI's own tools.
    """
    from comfy.quant_ops import QuantizedTensor
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = {}
    for name, plain in load_file(studio.models / "diffusion_models" / "toy_flux.safetensors").items():
        tensor = plain * times
        layer, _, part = name.rpartition(".")
        if part == "weight" and tensor.dim() == 2 and "_blocks." in name:
            quantised = QuantizedTensor.from_float(tensor, LAYOUTS[quantisation], scale="recalculate")
            tensors |= {key: value.contiguous() for key, value in quantised.state_dict(name).items()}
            layers[layer] = {"format": quantisation}
        else:
            tensors[name] = tensor
    save_file(tensors, target, metadata={"_quantization_metadata": json.dumps({"layers": layers})})
    return target


@pytest.mark.parametrize("quantisation", LAYOUTS)
def test_quantised_blocks(studio: Studio, quantisation: str, tmp_path: Path) -> None:
    import comfy.sd
    from comfy.quant_ops import QuantizedTensor

    path = quantised_file(studio, quantisation, tmp_path / "quantised.safetensors")
    model = comfy.sd.load_diffusion_model(str(path))
    plain = sum(studio.planned(studio.place(studio.flux())).values())
    stock, patched = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.place(model)
    assert sum(studio.planned(placed).values()) < plain * (0.75 if quantisation == "nvfp4" else 0.85)
    assert torch.equal(studio.latent(placed), stock)
    assert studio.resting(placed) == studio.planned(placed)
    block = placed.model.get_submodule("diffusion_model.single_blocks.2.linear1")
    assert isinstance(block.weight, QuantizedTensor) and isinstance(block.weight, torch.nn.Parameter)
    assert torch.equal(studio.latent(studio.lora(placed, 0.8)), patched)
    assert torch.equal(studio.latent(placed), stock)
    studio.unload()
    assert torch.equal(studio.latent(placed), stock)
    if studio.simulated:
        studio.world.reset()
        studio.latent(placed, steps=3)
        donor = studio.accelerators[1]
        streamed = studio.states.of(placed).residence.streamer.blocks
        extents = sum(block.size for block in streamed if str(block.device) == donor)
        assert studio.world.moved(donor, studio.accelerators[0]) == 3 * extents
