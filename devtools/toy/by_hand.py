"""State dicts whose shapes are simple enough to write down: Flux, TAESD, CLIP-L, and a LoRA for that Flux."""

from __future__ import annotations

from collections.abc import Iterator

import torch

State = dict[str, torch.Tensor]


class Weights:
    """Collects named random tensors from one seeded generator, so that every machine writes the same numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.state: State = {}
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, name: str, *shape: int, std: float) -> None:
        self.state[name] = (torch.randn(*shape, generator=self._generator) * std).to(self._dtype)

    def fill(self, name: str, value: float, *shape: int) -> None:
        self.state[name] = torch.full(shape, value, dtype=self._dtype)

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        """Scaled so that activations stay around one and every layer matters to the picture."""
        self.random(f"{name}.weight", outputs, inputs, std=inputs**-0.5)
        self.random(f"{name}.bias", outputs, std=0.1)


def flux(hidden: int = 256, double: int = 4, single: int = 8, context: int = 4096, vector: int = 2048) -> State:
    """Flux with 64 latent channels. `hidden` is a multiple of 128: ComfyUI derives the number of heads from it."""
    w = Weights(seed=1, dtype=torch.bfloat16)
    w.linear("img_in", hidden, 64)
    w.linear("txt_in", hidden, context)
    for name, inputs in (("time_in", 256), ("vector_in", vector), ("guidance_in", 256)):
        w.linear(f"{name}.in_layer", hidden, inputs)
        w.linear(f"{name}.out_layer", hidden, hidden)
    for block in range(double):
        for side in ("img", "txt"):
            name = f"double_blocks.{block}.{side}"
            w.linear(f"{name}_mod.lin", 6 * hidden, hidden)
            w.linear(f"{name}_attn.qkv", 3 * hidden, hidden)
            w.linear(f"{name}_attn.proj", hidden, hidden)
            w.linear(f"{name}_mlp.0", 4 * hidden, hidden)
            w.linear(f"{name}_mlp.2", hidden, 4 * hidden)
            for norm in ("query", "key"):
                w.fill(f"{name}_attn.norm.{norm}_norm.scale", 1.0, 128)
    for block in range(single):
        name = f"single_blocks.{block}"
        w.linear(f"{name}.linear1", 7 * hidden, hidden)
        w.linear(f"{name}.linear2", hidden, 5 * hidden)
        w.linear(f"{name}.modulation.lin", 3 * hidden, hidden)
        for norm in ("query", "key"):
            w.fill(f"{name}.norm.{norm}_norm.scale", 1.0, 128)
    w.linear("final_layer.linear", 64, hidden)
    w.linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden)
    return w.state


def flux_lora(model: State, rank: int = 4) -> State:
    """A LoRA for every attention and MLP layer of the Flux above, strong enough to change the picture."""
    w = Weights(seed=2, dtype=torch.bfloat16)
    for key, weight in model.items():
        if weight.dim() != 2 or not key.startswith(("double_blocks", "single_blocks")) or "mod" in key:
            continue
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        outputs, inputs = weight.shape
        w.random(f"{name}.lora_up.weight", outputs, rank, std=0.5 * rank**-0.5)
        w.random(f"{name}.lora_down.weight", rank, inputs, std=inputs**-0.5)
        w.fill(f"{name}.alpha", float(rank))
    return w.state


def taesd(latent_channels: int, scale: float, shift: float) -> State:
    """The TAESD architecture: a small VAE of plain convolutions."""
    w = Weights(seed=3, dtype=torch.float32)
    w.fill("vae_scale", scale)
    w.fill("vae_shift", shift)

    def conv(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        w.random(f"{name}.weight", outputs, inputs, 3, 3, std=0.5 * (2.0 / (9 * inputs)) ** 0.5)
        if bias:
            w.fill(f"{name}.bias", 0.0, outputs)

    def blocks(prefix: str, numbers: Iterator[int], count: int) -> None:
        for _ in range(count):
            number = next(numbers)
            for layer in (0, 2, 4):
                conv(f"{prefix}.{number}.conv.{layer}", 64, 64)

    encoder, numbers = "taesd_encoder", iter(range(99))
    conv(f"{encoder}.{next(numbers)}", 3, 64)
    blocks(encoder, numbers, 1)
    for _ in range(3):
        conv(f"{encoder}.{next(numbers)}", 64, 64, bias=False)
        blocks(encoder, numbers, 3)
    conv(f"{encoder}.{next(numbers)}", 64, latent_channels)

    decoder, numbers = "taesd_decoder", iter(range(1, 99))
    conv(f"{decoder}.{next(numbers)}", latent_channels, 64)
    next(numbers)  # an activation
    for _ in range(3):
        blocks(decoder, numbers, 3)
        next(numbers)  # an upsampling
        conv(f"{decoder}.{next(numbers)}", 64, 64, bias=False)
    blocks(decoder, numbers, 1)
    last = f"{decoder}.{next(numbers)}"
    conv(last, 64, 3)
    w.state[f"{last}.weight"] *= 4  # contrast that can be seen, around a middle grey
    w.state[f"{last}.bias"] += 0.5
    return w.state


def clip_l() -> State:
    """CLIP-L. ComfyUI fixes its dimensions, so this is the real size, 247 MB."""
    width, layers, vocabulary, positions = 768, 12, 49408, 77
    w = Weights(seed=4, dtype=torch.float16)

    def linear(name: str, outputs: int, inputs: int) -> None:
        w.random(f"{name}.weight", outputs, inputs, std=0.02)
        w.random(f"{name}.bias", outputs, std=0.02)

    def norm(name: str) -> None:
        w.fill(f"{name}.weight", 1.0, width)
        w.fill(f"{name}.bias", 0.0, width)

    w.random("text_model.embeddings.token_embedding.weight", vocabulary, width, std=0.02)
    w.random("text_model.embeddings.position_embedding.weight", positions, width, std=0.02)
    for layer in range(layers):
        name = f"text_model.encoder.layers.{layer}"
        for part in ("q", "k", "v", "out"):
            linear(f"{name}.self_attn.{part}_proj", width, width)
        linear(f"{name}.mlp.fc1", 4 * width, width)
        linear(f"{name}.mlp.fc2", width, 4 * width)
        norm(f"{name}.layer_norm1")
        norm(f"{name}.layer_norm2")
    norm("text_model.final_layer_norm")
    w.random("text_projection.weight", width, width, std=0.02)
    return w.state
