"""Random model files in bf16, fp8 or scaled fp8 with true shapes and the names by which ComfyUI recognises them.

    python tests/gpu/bench_models.py FAMILY [SIZE]

writes one (see `SIZES`) and prints its path. Folder: MULTIGPU_BENCH_MODELS, or /var/tmp.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Weight = tuple[str, tuple[int, ...], float | None]
"""Name, shape, and the standard deviation of its values; None: all are 1."""
SCALED = 64.0
"""The standard deviation of what is stored of a scaled weight."""
Linears = dict[str, tuple[int, int]]
"""Outputs and inputs by name."""

FLUX_DEV = {"hidden": 3072, "double": 19, "single": 38, "context": 4096, "vector": 768}
WAN_14B = {"dim": 5120, "ffn": 13824, "layers": 40}
QWEN_IMAGE = {"layers": 60}
SIZES = {
    "flux": {
        "whole": FLUX_DEV,
        "small": {**FLUX_DEV, "double": 2, "single": 4},
        "narrow": {**FLUX_DEV, "hidden": 384},
        "tiny": {**FLUX_DEV, "hidden": 384, "double": 2, "single": 4},
    },
    "wan": {"whole": WAN_14B, "small": {**WAN_14B, "layers": 3}, "tiny": {"dim": 256, "ffn": 512, "layers": 4}},
    "qwen": {"whole": QWEN_IMAGE, "small": {"layers": 3}, "tiny": {"layers": 1}},
}
"""By family. `small`: a few blocks of the true width; `narrow`: all blocks, thin; `tiny`: a few thin ones, for the
simulated devices (ComfyUI takes Qwen-Image's width for granted: its tiny one has 0.7 GB)."""
TEXT = {"flux": (256, 4096), "wan": (512, 4096), "qwen": (256, 3584)}
"""Tokens of a prompt and their width."""


def flux(hidden: int, double: int, single: int, context: int, vector: int) -> Iterator[Weight]:
    yield from _linears("", {"img_in": (hidden, 64), "txt_in": (hidden, context)})
    for name, into in (("time_in", 256), ("vector_in", vector), ("guidance_in", 256)):
        yield from _linears(f"{name}.", {"in_layer": (hidden, into), "out_layer": (hidden, hidden)})
    for block in range(double):
        for side in ("img", "txt"):
            name = f"double_blocks.{block}.{side}_"
            yield from _linears(
                name,
                {
                    "mod.lin": (6 * hidden, hidden),
                    "attn.qkv": (3 * hidden, hidden),
                    "attn.proj": (hidden, hidden),
                    "mlp.0": (4 * hidden, hidden),
                    "mlp.2": (hidden, 4 * hidden),
                },
            )
            yield from _ones(name, 128, "attn.norm.query_norm.scale", "attn.norm.key_norm.scale")
    for block in range(single):
        name = f"single_blocks.{block}."
        yield from _linears(
            name,
            {
                "linear1": (7 * hidden, hidden),
                "linear2": (hidden, 5 * hidden),
                "modulation.lin": (3 * hidden, hidden),
            },
        )
        yield from _ones(name, 128, "norm.query_norm.scale", "norm.key_norm.scale")
    yield from _linears("final_layer.", {"linear": (64, hidden), "adaLN_modulation.1": (2 * hidden, hidden)})


def wan(dim: int, ffn: int, layers: int) -> Iterator[Weight]:
    """Wan 2.1, text to video."""
    yield "patch_embedding.weight", (dim, 16, 1, 2, 2), 64**-0.5
    yield "patch_embedding.bias", (dim,), 0.1
    yield from _linears("text_embedding.", {"0": (dim, TEXT["wan"][1]), "2": (dim, dim)})
    yield from _linears("time_embedding.", {"0": (dim, 256), "2": (dim, dim)})
    yield from _linears("time_projection.", {"1": (6 * dim, dim)})
    for block in range(layers):
        name = f"blocks.{block}."
        for attention in ("self_attn.", "cross_attn."):
            yield from _linears(name + attention, dict.fromkeys("qkvo", (dim, dim)))
            yield from _ones(name + attention, dim, "norm_q.weight", "norm_k.weight")
        yield from _ones(name, dim, "norm3.weight")
        yield f"{name}norm3.bias", (dim,), 0.1
        yield from _linears(f"{name}ffn.", {"0": (ffn, dim), "2": (dim, ffn)})
        yield f"{name}modulation", (1, 6, dim), dim**-0.5
    yield from _linears("head.", {"head": (64, dim)})
    yield "head.modulation", (1, 2, dim), dim**-0.5


def qwen(layers: int, dim: int = 3072) -> Iterator[Weight]:
    text = TEXT["qwen"][1]
    yield from _linears("time_text_embed.timestep_embedder.", {"linear_1": (dim, 256), "linear_2": (dim, dim)})
    yield from _ones("", text, "txt_norm.weight")
    yield from _linears("", {"img_in": (dim, 64), "txt_in": (dim, text)})
    for block in range(layers):
        name = f"transformer_blocks.{block}."
        for side in ("img", "txt"):
            yield from _linears(
                f"{name}{side}_",
                {"mod.1": (6 * dim, dim), "mlp.net.0.proj": (4 * dim, dim), "mlp.net.2": (dim, 4 * dim)},
            )
        attention = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        yield from _linears(f"{name}attn.", dict.fromkeys(attention, (dim, dim)))
        norms = (f"norm_{which}.weight" for which in ("q", "k", "added_q", "added_k"))
        yield from _ones(f"{name}attn.", 128, *norms)
    yield from _linears("", {"norm_out.linear": (2 * dim, dim), "proj_out": (64, dim)})


FAMILIES = {"flux": flux, "wan": wan, "qwen": qwen}
KINDS = ("bf16", "fp8", "scaled")
"""How weights are stored. `fp8`: all of them so; `scaled`: the linears of the blocks in fp8, each with a scale, in the
form of ComfyUI's own tools, and the rest in bf16."""


def _linears(prefix: str, table: Linears) -> Iterator[Weight]:
    for name, (out, into) in table.items():
        yield f"{prefix}{name}.weight", (out, into), into**-0.5
        yield f"{prefix}{name}.bias", (out,), 0.1


def _ones(prefix: str, count: int, *names: str) -> Iterator[Weight]:
    for name in names:
        yield prefix + name, (count,), None


def weights(family: str, size: str) -> list[Weight]:
    return list(FAMILIES[family](**SIZES[family][size]))


def model_path(name: str) -> str:
    folder = Path(os.environ.get("MULTIGPU_BENCH_MODELS", "/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / name)


def path_of(family: str, size: str, kind: str = "bf16") -> str:
    return model_path(f"{family}_shaped_{size}{'' if kind == 'bf16' else f'_{kind}'}.safetensors")


def model_file(family: str, size: str, kind: str = "bf16") -> str:
    """The path of a model file, which is written if it is not there yet."""
    path = path_of(family, size, kind)
    if not os.path.exists(path):
        write(path, weights(family, size), kind)
    return path


def write(path: str, tensors: Iterable[Weight], kind: str = "bf16") -> None:
    """Weight by weight, made on the GPU where there is one and written by several threads. No two have equal values.

    A file that is there is complete, and on the disk: writing it does not slow down what is measured next.
    """
    entries, at = [], 0
    about = {"format": "pt"}
    header: dict[str, object] = {"__metadata__": about}
    layers: dict[str, dict[str, str]] = {}
    for name, shape, scale in tensors:
        scaled = kind == "scaled" and len(shape) == 2 and "blocks." in name
        dtype = "F8_E4M3" if scaled or kind == "fp8" else "BF16"
        size = (1 if dtype == "F8_E4M3" else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        entries.append((shape, SCALED if scaled else scale, at, dtype))
        at += size
        if scaled:
            assert scale is not None
            layers[name.removesuffix(".weight")] = {"format": "float8_e4m3fn"}
            header[f"{name}_scale"] = {"dtype": "F32", "shape": [], "data_offsets": [at, at + 4]}
            entries.append(((), scale / SCALED, at, "F32"))
            at += 4
    if layers:
        about["_quantization_metadata"] = json.dumps({"layers": layers})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{path}.part", "wb", buffering=0) as file, ThreadPoolExecutor(8) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        jobs = [
            pool.submit(_write_one, file.fileno(), 8 + len(text) + start, seed, shape, scale, dtype)
            for seed, (shape, scale, start, dtype) in enumerate(entries)
        ]
        for job in jobs:
            job.result()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)


def _write_one(file: int, at: int, seed: int, shape: tuple[int, ...], scale: float | None, dtype: str) -> None:
    import torch

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    if dtype == "F32":
        values = torch.tensor(scale, dtype=torch.float32, device=device)
    elif scale is None:
        values = torch.ones(shape, dtype=torch.bfloat16, device=device)
    else:
        random = torch.Generator(device=device).manual_seed(seed)
        values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=random) * scale
    if dtype == "F8_E4M3":
        values = values.to(torch.float8_e4m3fn)
    if gpu:
        values = torch.empty(shape, dtype=values.dtype, pin_memory=True).copy_(values)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    written = os.pwrite(file, data, at)
    if written != len(data):
        raise OSError(f"{written} of {len(data)} bytes were written: is the disk full?")


if __name__ == "__main__":
    sys.stdout.write(model_file(sys.argv[1], *(sys.argv[2:] or ["whole"])) + "\n")
