import os

import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher

device = mm.get_torch_device()
offload_device = mm.unet_offload_device()


class Transformer(torch.nn.Module):
    def __init__(self, seed, main_device, offload_device):
        super().__init__()
        self.main_device, self.offload_device, self.cache_device = main_device, offload_device, offload_device
        generator = torch.Generator().manual_seed(seed)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))
        for block in self.blocks:
            block.weight.data = torch.randn(8, 8, generator=generator)


class VideoModel(torch.nn.Module):
    def __init__(self, transformer):
        super().__init__()
        self.diffusion_model = transformer


class ModelLoader:
    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": (["one", "two"],),
                "base_precision": (["fp32", "bf16"], {"default": "bf16"}),
                "quantization": (["disabled"],),
                "load_device": (["main_device", "offload_device"], {"default": "offload_device"}),
            },
            "optional": {"block_swap_args": ("BLOCKSWAPARGS",)},
        }

    RETURN_TYPES, RETURN_NAMES = ("WANVIDEOMODEL",), ("model",)
    FUNCTION = "loadmodel"

    def loadmodel(self, model, base_precision, quantization, load_device, block_swap_args=None):
        if quantization != "disabled":
            raise ValueError(f"no weights for {quantization}")
        transformer = Transformer(len(model), device, offload_device)
        transformer.to(device if load_device == "main_device" else offload_device)
        patcher = ModelPatcher(VideoModel(transformer), device, offload_device)
        patcher.model_options["transformer_options"] = {"block_swap_args": block_swap_args}
        return (patcher,)


class BlockSwap:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"blocks_to_swap": ("INT", {"default": 2, "min": 0, "max": 48})}}

    RETURN_TYPES, RETURN_NAMES = ("BLOCKSWAPARGS",), ("block_swap_args",)
    FUNCTION = "setargs"

    def setargs(self, **arguments):
        return (arguments,)


class TextEncoderLoader:
    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"model_name": (["t5"],), "precision": (["fp32", "bf16"],)},
            "optional": {
                "load_device": (["main_device", "offload_device"], {"default": "offload_device"}),
                "quantization": (["disabled"],),
            },
        }

    RETURN_TYPES, RETURN_NAMES = ("WANTEXTENCODER",), ("wan_t5_model",)
    FUNCTION = "loadmodel"

    def loadmodel(self, model_name, precision, load_device="offload_device", quantization="disabled"):
        where = mm.get_torch_device() if load_device == "main_device" else mm.unet_offload_device()
        return ({"weight": torch.ones(8, device=where), "load_device": load_device},)


class TextEncode:
    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"positive_prompt": ("STRING", {"multiline": True})},
            "optional": {"t5": ("WANTEXTENCODER",), "device": (["gpu", "cpu"], {"default": "gpu"})},
        }

    RETURN_TYPES, RETURN_NAMES = ("WANVIDEOTEXTEMBEDS",), ("text_embeds",)
    FUNCTION = "process"

    def process(self, positive_prompt, t5=None, device="gpu"):
        where = mm.get_torch_device() if device == "gpu" else torch.device("cpu")
        return ({"embeds": t5["weight"].to(where) * len(positive_prompt), "device": device},)


class VaeLoader:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model_name": (["vae"],)}, "optional": {"precision": (["fp16", "bf16"],)}}

    RETURN_TYPES, RETURN_NAMES = ("WANVAE",), ("vae",)
    FUNCTION = "loadmodel"

    def loadmodel(self, model_name, precision="bf16"):
        return ({"weight": torch.ones(8), "main": device, "process": os.getpid()},)


class Decode:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("WANVAE",), "samples": ("LATENT",)}}

    RETURN_TYPES, RETURN_NAMES = ("IMAGE",), ("images",)
    FUNCTION = "decode"

    def decode(self, vae, samples):
        image = samples["samples"].to(device) * vae["weight"].to(device)
        return (image.reshape(1, 4, 2, 1).expand(1, 4, 2, 3).clone(),)
