"""Model files with real headers and a hole where the data would be: a 24 GB file takes a few kilobytes of disk."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

Tensors = Mapping[str, tuple[int, ...]]
BF16 = 2


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """All tensors as bf16, in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = BF16
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return write_raw_safetensors(path, json.dumps(header).encode(), at)


def write_raw_safetensors(path: Path, header: bytes, data_bytes: int) -> Path:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data_bytes)
    return path


def write_gguf(path: Path, tensors: Tensors, *, strings: Iterable[str] = (), alignment: int = 64) -> Path:
    """All tensors as bf16 (type 30), with an array of strings and an alignment among the metadata."""
    words = list(strings)
    body = _text("general.alignment") + struct.pack("<II", 4, alignment)
    body += _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(_text, words))
    body += _text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + bytes(12)
    body += _text("general.name") + struct.pack("<I", 8) + _text("a model")
    at = 0
    for name, shape in tensors.items():
        body += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 30, at)
        size = BF16
        for dimension in shape:
            size *= dimension
        at += -(-size // alignment) * alignment
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 4) + body
    with path.open("wb") as file:
        file.write(header)
        file.truncate(-(-len(header) // alignment) * alignment + at)
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def flux_tensors(
    doubles: int = 19, singles: int = 38, width: int = 3072, prefix: str = ""
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Flux-dev, final layer first, as a file may well have them."""
    tensors = {**linear("final_layer.linear", 64, width), **linear("final_layer.adaLN_modulation.1", 2 * width, width)}
    for index in range(singles):
        at = f"single_blocks.{index}"
        tensors |= linear(f"{at}.linear2", width, 5 * width) | linear(f"{at}.linear1", 7 * width, width)
        tensors |= linear(f"{at}.modulation.lin", 3 * width, width) | {f"{at}.norm.query_norm.scale": (128,)}
    for index in range(doubles):
        for stream in ("txt", "img"):
            at = f"double_blocks.{index}.{stream}"
            tensors |= linear(f"{at}_mlp.0", 4 * width, width) | linear(f"{at}_mlp.2", width, 4 * width)
            tensors |= linear(f"{at}_attn.proj", width, width) | linear(f"{at}_attn.qkv", 3 * width, width)
            tensors |= linear(f"{at}_mod.lin", 6 * width, width) | {f"{at}_attn.norm.query_norm.scale": (128,)}
    tensors |= linear("txt_in", width, 4096) | linear("img_in", width, 64)
    for name, into in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        tensors |= linear(f"{name}.in_layer", width, into) | linear(f"{name}.out_layer", width, width)
    return {prefix + name: shape for name, shape in tensors.items()}


def write_gguf_types(path: Path, kinds: Iterable[int], version: int = 3) -> list[tuple[str, str, tuple[int, ...], int]]:
    """A file of the gguf package's own writer: a matrix and a vector of each type, all bytes zero.

    Returns name, type, shape and bytes of each. The package writes version 3 alone, but for the number in the file.
    """
    gguf = importlib.import_module("gguf")
    numpy = importlib.import_module("numpy")
    writer, rows = gguf.GGUFWriter(path, "flux"), []
    for kind in map(gguf.GGMLQuantizationType, kinds):
        group, size = gguf.GGML_QUANT_SIZES[kind]
        for name, shape in ((f"{kind.name}.weight", (3, 2 * group)), (f"{kind.name}.bias", (group,))):
            data = numpy.zeros((*shape[:-1], shape[-1] // group * size), dtype=numpy.uint8)
            writer.add_tensor(name, data, raw_dtype=kind)
            rows.append((name, kind.name, shape, data.nbytes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", version))
    return rows
