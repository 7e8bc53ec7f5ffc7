import comfy.model_management as mm
import torch

from . import fixed, swapping

device = mm.get_torch_device()
offload_device = mm.unet_offload_device()


class Sampler:
    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("WANVIDEOMODEL",),
                "steps": ("INT", {"default": 2}),
                "seed": ("INT", {"default": 0}),
            },
            "optional": {"text_embeds": ("WANVIDEOTEXTEMBEDS",)},
        }

    RETURN_TYPES, RETURN_NAMES = ("LATENT", "LATENT"), ("samples", "denoised_samples")
    FUNCTION = "process"

    def process(self, model, steps, seed, text_embeds=None):
        transformer = model.model.diffusion_model
        swapped = (model.model_options["transformer_options"]["block_swap_args"] or {}).get("blocks_to_swap", 0)
        x = torch.randn(8, generator=torch.Generator().manual_seed(seed)).to(device)
        if text_embeds is not None:
            x = x + text_embeds["embeds"].to(device)
        rested = {str(swapping.rest(block)) for block in transformer.blocks[:swapped]}
        for _ in range(steps):
            for block in transformer.blocks:
                block.to(device)
                x = torch.tanh(block(x))
            rested |= {str(swapping.rest(block)) for block in transformer.blocks[:swapped]}
        seen = {"computed": str(x.device), "rested": sorted(rested), "fixed": str(fixed.device)}
        seen["transformer"] = [str(transformer.offload_device), str(transformer.cache_device)]
        transformer.to(offload_device)
        if steps > 100:
            raise ValueError(f"{steps} steps are too many")
        latent = {"samples": x.detach().cpu(), "seen": seen}
        return (latent, latent)
