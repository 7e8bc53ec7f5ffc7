"""Small model files for `check_gguf.py`: a Flux in any quantisation, and text encoders in GGUF files.

ComfyUI fixes the number of layers of T5 XXL, CLIP-G and Llama 3, and the width of what goes from layer to layer. Inside
the layers ComfyUI-GGUF takes matrices of any shape, so these are as narrow as the number of heads allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import load_file, save_file

Kind = gguf.GGMLQuantizationType
Array = numpy.ndarray[Any, Any]
Shapes = Mapping[str, tuple[int, ...]]

SCALES = {
    Kind.Q2_K: (80, 82, 1.5), Kind.Q3_K: (108, None, 0.0), Kind.Q4_K: (0, 2, 7.5), Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0.0), Kind.IQ4_NL: (0, None, 0.0), Kind.IQ4_XS: (0, None, 0.0), Kind.IQ3_S: (0, None, 0.0),
}  # fmt: skip
"""Types that the package cannot write: where a group has its scale and its minimum, and how many scales the latter is
so that the values lie around zero."""

KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", *(kind.name for kind in SCALES))
"""Of these, ComfyUI-GGUF has its own code for all but TQ2_0 and IQ3_S, which it hands to the gguf package."""

DISTINCT = 256  # rows of a random matrix that differ; the others repeat them


def quantised(values: Array, kind: Kind) -> tuple[Array, Kind]:
    """A matrix in this type, or in F16 if its rows are no whole groups; everything else in F32."""
    group, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim != 2:
        return values.astype(numpy.float32), Kind.F32
    if values.shape[1] % group:
        return values.astype(numpy.float16), Kind.F16
    if kind in SCALES:
        return _random_groups(values, kind), kind
    return gguf.quants.quantize(values, kind), kind


def _random_groups(like: Array, kind: Kind) -> Array:
    """Random bytes with a scale that gives values of the same size as those of `like`."""
    group, size = gguf.GGML_QUANT_SIZES[kind]
    scale_at, minimum_at, minimum = SCALES[kind]
    made = numpy.random.default_rng(like.size).integers(0, 256, (like.size // group, size), dtype=numpy.uint8)

    def put(at: int, value: float) -> None:
        made[:, at : at + 2] = numpy.array([value], dtype=numpy.float16).view(numpy.uint8)

    for scale in (1.0, None):
        scale = scale or like.std() / gguf.quants.dequantize(made[:64], kind).std()
        put(scale_at, scale)
        if minimum_at is not None:
            put(minimum_at, scale * minimum)
    return made.reshape(like.shape[0], -1)


def write_gguf(target: Path, architecture: str, tensors: Iterable[tuple[str, Array, int]], kind: str) -> None:
    """`tensors` are names, values and numbers of rows; if there are fewer values than that, they are repeated."""
    writer = gguf.GGUFWriter(target, architecture)
    for name, values, rows in tensors:
        data, stored = quantised(values, Kind[kind])
        writer.add_tensor(name, numpy.resize(data, (rows, *data.shape[1:])), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_flux(source: Path, target: Path, kind: str, pooled: int = 2048) -> None:
    """The tiny Flux. `pooled` is how many numbers it takes of a text encoder's summary: 768 of CLIP-L alone."""

    def tensors() -> Iterator[tuple[str, Array, int]]:
        for name, tensor in load_file(source).items():
            taken = tensor[:, :pooled] if name == "vector_in.in_layer.weight" else tensor
            yield name, taken.contiguous().to(torch.float32).numpy(), len(taken)

    write_gguf(target, "flux", tensors(), kind)


def write_random(target: Path, architecture: str, shapes: Shapes, kind: str) -> None:
    write_gguf(target, architecture, ((name, filled(name, shape), shape[0]) for name, shape in shapes.items()), kind)


def filled(name: str, shape: tuple[int, ...]) -> Array:
    """Ones for norms, small random numbers for biases, and the first rows of a random matrix."""
    chance = numpy.random.default_rng([*name.encode()])
    if len(shape) == 1:
        return chance.standard_normal(shape) * 0.1 if name.endswith("bias") else numpy.ones(shape)
    distinct = chance.standard_normal((min(shape[0], DISTINCT), shape[1]), dtype=numpy.float32)
    return distinct if "embed" in name or "embd" in name else distinct * shape[1] ** -0.5


def t5(tokens: int = 4096, width: int = 4096, heads: int = 64, narrow: int = 64) -> Shapes:
    """T5 XXL; it has the tokens of our text. ComfyUI knows it by the real size of the last layer's ffn_up."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, width), "enc.output_norm.weight": (width,)}
    shapes["enc.blk.0.attn_rel_b.weight"] = (32, heads)
    for layer in range(24):
        at, inner = f"enc.blk.{layer}", narrow if layer < 23 else 10240
        shapes |= {f"{at}.{name}.weight": (heads, width) for name in ("attn_q", "attn_k", "attn_v")}
        shapes |= {f"{at}.{name}.weight": (inner, width) for name in ("ffn_up", "ffn_gate")}
        shapes |= {f"{at}.attn_o.weight": (width, heads), f"{at}.ffn_down.weight": (width, inner)}
        shapes |= {f"{at}.attn_norm.weight": (width,), f"{at}.ffn_norm.weight": (width,)}
    return shapes


def llama(tokens: int = 128256, width: int = 4096, keys: int = 1024, narrow: int = 64) -> Shapes:
    """Llama 3 8B. Its heads and its tokens cannot be fewer, so that only the layers' MLPs are narrow."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, width), "output_norm.weight": (width,)}
    for layer in range(32):
        at = f"blk.{layer}"
        shapes |= {f"{at}.attn_q.weight": (width, width), f"{at}.attn_output.weight": (width, width)}
        shapes |= {f"{at}.{name}.weight": (keys, width) for name in ("attn_k", "attn_v")}
        shapes |= {f"{at}.{name}.weight": (narrow, width) for name in ("ffn_up", "ffn_gate")}
        shapes |= {f"{at}.ffn_down.weight": (width, narrow)}
        shapes |= {f"{at}.attn_norm.weight": (width,), f"{at}.ffn_norm.weight": (width,)}
    return shapes


def write_clip_g(target: Path, width: int = 1280, heads: int = 20, narrow: int = 64) -> None:
    """CLIP-G as safetensors: the pack reads none from GGUF files."""
    shapes: dict[str, tuple[int, ...]] = {"text_projection.weight": (width, width)}
    shapes["text_model.embeddings.token_embedding.weight"] = (49408, width)
    shapes["text_model.embeddings.position_embedding.weight"] = (77, width)
    norms = ["text_model.final_layer_norm"]
    for layer in range(32):
        at = f"text_model.encoder.layers.{layer}"
        norms += [f"{at}.layer_norm1", f"{at}.layer_norm2"]
        for name, out, into in (
            ("self_attn.q_proj", heads, width), ("self_attn.k_proj", heads, width), ("self_attn.v_proj", heads, width),
            ("self_attn.out_proj", width, heads), ("mlp.fc1", narrow, width), ("mlp.fc2", width, narrow),
        ):  # fmt: skip
            shapes |= {f"{at}.{name}.weight": (out, into), f"{at}.{name}.bias": (out,)}
    shapes |= {f"{norm}.{name}": (width,) for norm in norms for name in ("weight", "bias")}
    made = {name: numpy.resize(filled(name, shape), shape) for name, shape in shapes.items()}
    save_file({name: torch.from_numpy(values).to(torch.float16) for name, values in made.items()}, target)
