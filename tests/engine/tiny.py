"""Components of a few kilobytes with random weights, made of the host's own classes, for tests that need many of them.

They come from no file, as the components of many packs do: their patchers do not know how they were loaded.
"""

from __future__ import annotations

from typing import Any

import torch

WIDTH = 32


def _fill(model: torch.nn.Module) -> torch.nn.Module:
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=random) / 8)
    return model.eval()


def devices() -> tuple[torch.device, torch.device]:
    """The load device and the offload device of the host's loaders."""
    import comfy.model_management as memory

    return memory.get_torch_device(), memory.unet_offload_device()


def flux() -> Any:
    """A Flux of one double and one single block."""
    import comfy.supported_models

    shape = {"hidden_size": 64, "num_heads": 4, "axes_dim": [4, 6, 6], "mlp_ratio": 2.0, "depth": 1}
    inputs = {"in_channels": 16, "out_channels": 16, "vec_in_dim": WIDTH, "context_in_dim": WIDTH, "patch_size": 2}
    more = {"depth_single_blocks": 1, "theta": 10000, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": []}
    return _made(comfy.supported_models.Flux({"image_model": "flux", **shape, **inputs, **more}))


def qwen() -> Any:
    """A Qwen-Image of two blocks."""
    import comfy.supported_models

    shape = {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": WIDTH}
    return _made(comfy.supported_models.QwenImage({"image_model": "qwen_image", **shape}))


def sd3() -> Any:
    """A Stable Diffusion 3 of four blocks: its width is 64 times as much."""
    import comfy.supported_models

    embedder = {"target": "torch.nn.Linear", "params": {"in_features": WIDTH, "out_features": 256}}
    inputs = {"in_channels": 16, "adm_in_channels": WIDTH, "context_size": WIDTH, "context_embedder_config": embedder}
    shape = {"depth": 4, "patch_size": 2, "pos_embed_max_size": 16, "num_patches": 256, "input_size": None}
    model = _made(comfy.supported_models.SD3({**inputs, **shape, "pos_embed_scaling_factor": None}))
    model.diffusion_model.pos_embed.zero_()
    return model


def _made(config: Any) -> Any:
    config.set_inference_dtype(torch.bfloat16, None)
    return _fill(config.get_model({}, "", device=devices()[1]))


def text_model() -> Any:
    """A CLIP text model of two layers."""
    from comfy.sd1_clip import SD1ClipModel, SDClipModel

    config = {
        "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 8, "eos_token_id": 2, "hidden_act": "gelu",
    }  # fmt: skip
    return _fill(SD1ClipModel(dtype=torch.float16, clip_model=SDClipModel, textmodel_json_config=config))


class Letters:
    """A tokenizer with a token for each of the first six letters."""

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
        return {"l": [[(49406, 1.0), *((ord(letter), 1.0) for letter in f"{text:6.6}"), (49407, 1.0)]]}

    def state_dict(self) -> dict[str, Any]:
        return {}


def as_clip(clip: Any, patcher: Any) -> Any:
    """`clip`, empty so far, as a text encoder around a patcher."""
    clip.patcher, clip.cond_stage_model, clip.tokenizer = patcher, patcher.model, Letters()
    clip.layer_idx, clip.tokenizer_options, clip.use_clip_schedule, clip.apply_hooks_to_conds = None, {}, False, None
    patcher.is_clip = True
    return clip


class ControlModel(torch.nn.Module):
    """What a tiny Flux's only double block adds to its image tokens, from a hint."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        import comfy.ops

        super().__init__()
        self.into = comfy.ops.manual_cast.Linear(3, 64, dtype=self.dtype)
        self.layers = torch.nn.ModuleList(comfy.ops.manual_cast.Linear(64, 64, dtype=self.dtype) for _ in range(3))

    def forward(self, x: torch.Tensor, hint: torch.Tensor, **_: Any) -> dict[str, Any]:
        image = torch.nn.functional.adaptive_avg_pool2d(hint, (x.shape[2] // 2, x.shape[3] // 2))
        tokens = self.into(image.flatten(2).transpose(1, 2).to(x.dtype))
        for layer in self.layers:
            tokens = layer(tokens)
        return {"input": [tokens], "middle": [], "output": []}


def control_model() -> Any:
    return _fill(ControlModel())
