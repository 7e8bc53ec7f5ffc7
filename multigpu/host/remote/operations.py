"""What can be asked of a component on another machine: plain values in, plain values out.

The worker runs these on the component that it keeps. This machine runs the same ones, on a component of its own, when
the other machine was lost and fall back is on: none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy import model_management
from comfy.patcher_extension import merge_nested_dicts

from ..components import find_component, moved
from ..loaded_models import entries, unload_all_but

Operation = Callable[..., Any]

LIKE_NOISE = ("noise", "latent_image", "denoise_mask")
"""The conditions that the host has on the compute device when it asks a model what it makes of them."""


def tokenize(clip: Any, text: Any, word_ids: bool, options: dict[str, Any]) -> Any:
    """The tokens of a text, as the encoder's own tokenizer makes them."""
    return clip.tokenizer.tokenize_with_weights(text, word_ids, **options)


def encode_text(clip: Any, tokens: Any, layer: int | None, projected: bool) -> Any:
    """What the encoder makes of tokens, with the pooled output projected or not."""
    own = clip.clone()
    own.layer_idx = layer
    return own.encode_from_tokens(tokens, return_pooled=True if projected else "unprojected", return_dict=True)


def generate_text(clip: Any, tokens: Any, options: dict[str, Any]) -> Any:
    return clip.generate(tokens, **options)


def detokenize(clip: Any, tokens: Any, options: dict[str, Any]) -> Any:
    return clip.decode(tokens, **options)


def vae_encode(vae: Any, pixels: torch.Tensor) -> Any:
    return vae.encode(pixels)


def vae_encode_tiled(vae: Any, pixels: torch.Tensor, options: dict[str, Any]) -> Any:
    return vae.encode_tiled(pixels, **options)


def vae_decode(vae: Any, samples: torch.Tensor, options: dict[str, Any]) -> Any:
    return vae.decode(samples, vae_options=options)


def vae_decode_tiled(vae: Any, samples: torch.Tensor, options: dict[str, Any]) -> Any:
    return vae.decode_tiled(samples, **options)


def conditions(patcher: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the diffusion model makes of the conditions of a prompt, once for all steps. Loads the model."""
    device, noise = patcher.load_device, given["noise"]
    model = _loaded(patcher, [2 * noise.shape[0], *noise.shape[1:]])
    given = {name: moved(value, device) if name in LIKE_NOISE else value for name, value in given.items()}
    made = model.extra_conds(**given, device=device)
    return {
        "conditions": {
            name: [type(each).__module__, type(each).__qualname__, each.cond] for name, each in made.items()
        },
        "free": int(patcher.get_free_memory(device)),
    }


def denoise(patcher: Any, positional: list[Any], named: dict[str, Any], options: dict[str, Any]) -> Any:
    """One forward of the diffusion model. `options` are the host's transformer options."""
    model, device = _loaded(patcher, list(positional[0].shape)), patcher.load_device
    whole = merge_nested_dicts(patcher.model_options["transformer_options"], {"wrappers": patcher.wrappers})
    whole = merge_nested_dicts(whole, moved(options, device))
    whole["prefetch_dynamic_vbars"] = patcher.is_dynamic()
    return model.diffusion_model(*moved(positional, device), **moved(named, device), transformer_options=whole)


def _loaded(patcher: Any, shape: list[int]) -> Any:
    """The model of a patcher, loaded and ready to compute with an input of this shape."""
    if not any(entry.model is patcher for entry in entries()):
        models = [patcher, *patcher.get_nested_additional_models()]
        model_management.load_models_gpu(models, memory_required=patcher.memory_required(shape))
        patcher.pre_run()
    return patcher.model


OPERATIONS: dict[str, Operation] = {
    each.__name__: each
    for each in (tokenize, encode_text, generate_text, detokenize, vae_encode, vae_encode_tiled, vae_decode,
                 vae_decode_tiled, conditions, denoise)
}  # fmt: skip


def unload(component: Any) -> None:
    """Unload the model of a component from its devices, and no other. It stays in RAM."""
    found = find_component(component)
    if found is not None:
        unload_all_but([entry for entry in entries() if entry.model.model is not found.patcher.model])
