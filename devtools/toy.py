"""Writes tiny models that ComfyUI's stock loaders accept: `python -m devtools.toy COMFYUI_TREE FOLDER`.

Their shapes come from ComfyUI's own classes, their weights are random and the same on every machine.
"""

# ruff: noqa: E402
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TREE, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(TREE))
import comfy.cli_args

comfy.cli_args.args.cpu = True
import comfy.ops
from comfy.cldm.cldm import ControlNet
from comfy.clip_model import CLIPTextModel
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.ldm.wan.model import WanModel
from comfy.ldm.wan.vae import WanVAE
from comfy.taesd.taesd import TAESD

State = dict[str, torch.Tensor]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EMPTY: dict[str, Any] = {"device": "meta", "operations": comfy.ops.disable_weight_init}

FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 2048, "context_in_dim": 4096, "hidden_size": 256,
    "mlp_ratio": 4.0, "num_heads": 2, "depth": 4, "depth_single_blocks": 8, "axes_dim": [16, 56, 56], "theta": 10000,
    "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip

SD15 = {
    "image_size": 32, "in_channels": 4, "model_channels": 320, "num_res_blocks": [1, 1], "channel_mult": [1, 1],
    "transformer_depth": [1, 1], "transformer_depth_middle": 1, "num_heads": 8, "context_dim": 768,
    "use_spatial_transformer": True, "use_linear_in_transformer": False, "legacy": False, "dtype": F16,
}  # fmt: skip
"""Two levels instead of four; 320 channels, as ComfyUI's detection expects."""

WAN = {
    "model_type": "t2v", "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 4, "in_dim": 16, "out_dim": 16,
    "text_dim": 4096, "dtype": F32,
}  # fmt: skip


def models() -> Iterator[tuple[str, State]]:
    """Every model with its folder and name."""
    flux = filled(Flux(**FLUX, **EMPTY), seed=1, dtype=BF16)
    flux = {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in flux.items()}  # as in real files
    yield "diffusion_models/toy_flux", flux
    yield "loras/toy_flux_lora", lora(flux)
    # ComfyUI fixes the dimensions of CLIP-L, so this one has its real size.
    sizes = json.loads((TREE / "comfy" / "sd1_clip_config.json").read_text(encoding="utf-8"))
    clip = filled(CLIPTextModel(sizes, F16, **EMPTY), seed=4, dtype=F16)
    yield "text_encoders/toy_clip_l", clip
    yield "vae/toy_taef1", taesd(16, scale=0.3611, shift=0.1159)
    unet = filled(UNetModel(**SD15, **EMPTY, out_channels=4, transformer_depth_output=[1, 1, 1, 1]), 5, F16)
    encoder = {name: tensor for name, tensor in clip.items() if name.startswith("text_model")}
    parts = {"model.diffusion_model.": unet, "cond_stage_model.transformer.": encoder}
    parts["first_stage_model."] = taesd(4, scale=0.18215, shift=0.0)
    yield "checkpoints/toy_sd15", {prefix + name: parts[prefix][name] for prefix in parts for name in parts[prefix]}
    # The zero convolutions of this ControlNet are not zero, so that it changes the picture.
    yield "controlnet/toy_sd15_controlnet", filled(ControlNet(hint_channels=3, **SD15, **EMPTY), 6, F16)
    yield "diffusion_models/toy_wan", filled(WanModel(**WAN, **EMPTY), 7, BF16)
    with torch.device("meta"):
        wan_vae = WanVAE(dim=16, z_dim=16, attn_scales=[], temperal_downsample=[False, True, True])
    yield "vae/toy_wan_vae", filled(wan_vae, 8, F32)


def filled(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> State:
    """Weights for a model: norms are ones, the rest is random.

    They are scaled so that activations stay around one and every layer matters to the picture.
    """
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, tensor in model.state_dict().items():
        if name.endswith("gamma") or (tensor.dim() == 1 and not name.endswith("bias")):
            state[name] = torch.ones(tensor.shape, dtype=dtype)
        else:
            std = 0.1 if tensor.dim() < 2 else math.prod(tensor.shape[1:]) ** -0.5
            state[name] = (torch.randn(tensor.shape, generator=generator) * std).to(dtype)
    return state


def taesd(latent_channels: int, scale: float, shift: float) -> State:
    """A small VAE of plain convolutions. The last one gives contrast that can be seen, around a middle grey."""
    with torch.device("meta"):
        model = TAESD(latent_channels=latent_channels)
    state = filled(model, seed=3, dtype=F32) | {"vae_scale": torch.tensor(scale), "vae_shift": torch.tensor(shift)}
    last = f"taesd_decoder.{len(model.taesd_decoder) - 1}"
    state[f"{last}.weight"] *= 4
    state[f"{last}.bias"] += 0.5
    return state


def lora(model: State, rank: int = 4) -> State:
    """A LoRA for every attention and MLP layer of a Flux, strong enough to change the picture."""
    generator, state = torch.Generator().manual_seed(2), {}
    for key, weight in model.items():
        if weight.dim() == 2 and key.startswith(("double_blocks", "single_blocks")) and "mod" not in key:
            name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
            up = torch.randn(weight.shape[0], rank, generator=generator) * 0.5 * rank**-0.5
            down = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
            state[f"{name}.lora_up.weight"], state[f"{name}.lora_down.weight"] = up.to(BF16), down.to(BF16)
            state[f"{name}.alpha"] = torch.tensor(float(rank), dtype=BF16)
    return state


if __name__ == "__main__":
    for title, weights in models():
        path = FOLDER / f"{title}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path, metadata={"format": "pt"})
        sys.stdout.write(f"{title} ({path.stat().st_size / 1e6:.0f} MB)\n")
        sys.stdout.flush()
