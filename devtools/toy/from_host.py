"""State dicts whose shapes come from ComfyUI's own classes: the SD1.5 UNet, its ControlNet, Wan 2.1 and its VAE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from .by_hand import State, Weights


def use(tree: Path) -> None:
    """Make the ComfyUI tree importable, on the CPU. Call once, before the others."""
    sys.path.insert(0, str(tree))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def unet_sd15() -> State:
    """SD1.5's UNet with two levels instead of four; 320 channels, as ComfyUI's detection expects."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return _filled(UNetModel(**_unet_config(), transformer_depth_output=[1, 1, 1, 1]), seed=5, dtype=torch.float16)


def controlnet_sd15() -> State:
    """A ControlNet for that UNet. Its zero convolutions are not zero, so that it changes the picture."""
    from comfy.cldm.cldm import ControlNet

    return _filled(ControlNet(hint_channels=3, **_unet_config()), seed=6, dtype=torch.float16)


def wan() -> State:
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    model = WanModel(
        model_type="t2v", dim=256, ffn_dim=512, num_heads=2, num_layers=4, in_dim=16, out_dim=16, text_dim=4096,
        device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    return _filled(model, seed=7, dtype=torch.bfloat16)


def wan_vae() -> State:
    from comfy.ldm.wan.vae import WanVAE

    with torch.device("meta"):
        model = WanVAE(dim=16, z_dim=16, attn_scales=[], temperal_downsample=[False, True, True])
    return _filled(model, seed=8, dtype=torch.float32)


def _unet_config() -> dict[str, Any]:
    import comfy.ops

    return {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [1, 1],
        "channel_mult": [1, 1], "transformer_depth": [1, 1], "transformer_depth_middle": 1, "num_heads": 8,
        "context_dim": 768, "use_spatial_transformer": True, "use_linear_in_transformer": False, "legacy": False,
        "dtype": torch.float16, "device": "meta", "operations": comfy.ops.manual_cast,
    }  # fmt: skip


def _filled(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> State:
    """Random weights in the shapes of a model: norms are ones, biases zeros, the rest keeps activations around one."""
    w = Weights(seed, dtype)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("gamma") or (len(shape) == 1 and name.endswith("weight")):
            w.fill(name, 1.0, *shape)
        elif len(shape) == 1:
            w.fill(name, 0.0, *shape)
        else:
            w.random(name, *shape, std=tensor[0].numel() ** -0.5)
    return w.state
