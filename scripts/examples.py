"""Write the example workflows, in the form that ComfyUI's frontend saves: `python -m scripts.examples`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "example_workflows"
COLUMN, ROW = 360, 40

Link = tuple["Box", int]


@dataclass
class Box:
    """A node on the canvas: its inputs by name and type, its outputs by type, its widgets in order."""

    kind: str
    column: int
    row: int
    widgets: list[Any]
    inputs: dict[str, tuple[str, Link]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    height: int = 100
    width: int = 320

    def __getitem__(self, slot: int) -> Link:
        return self, slot


def graph(boxes: list[Box], note: str) -> dict[str, Any]:
    """Boxes and a note as a saved workflow."""
    ids = {id(box): number for number, box in enumerate(boxes, 1)}
    links: list[list[Any]] = []
    nodes = [_node(box, ids, links) for box in boxes]
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in links if link[1:3] == [node["id"], slot]]
    number = len(boxes) + 1
    nodes.append(
        {
            "id": number, "type": "Note", "pos": [0, -200], "size": [700, 140], "flags": {}, "order": 0, "mode": 0,
            "inputs": [], "outputs": [], "properties": {}, "widgets_values": [note], "color": "#432", "bgcolor": "#653",
        }
    )  # fmt: skip
    return {
        "last_node_id": number, "last_link_id": len(links), "nodes": nodes, "links": links, "groups": [], "config": {},
        "extra": {}, "version": 0.4,
    }  # fmt: skip


def _node(box: Box, ids: dict[int, int], links: list[list[Any]]) -> dict[str, Any]:
    number = ids[id(box)]
    inputs = []
    for slot, (name, (kind, (source, output))) in enumerate(box.inputs.items()):
        links.append([len(links) + 1, ids[id(source)], output, number, slot, kind])
        inputs.append({"name": name, "type": kind, "link": len(links)})
    return {
        "id": number, "type": box.kind, "pos": [box.column * COLUMN, box.row * ROW], "size": [box.width, box.height],
        "flags": {}, "order": number, "mode": 0, "inputs": inputs,
        "outputs": [{"name": kind, "type": kind, "links": []} for kind in box.outputs],
        "properties": {"Node name for S&R": box.kind}, "widgets_values": box.widgets,
    }  # fmt: skip


def _place(kind: str, socket: str, source: Link, row: int, compute: str = "default", mode: str = "auto",
           virtual: float = 4.0, donor: str = "cpu", expert: str = "", keep: str = "default") -> Box:  # fmt: skip
    name = socket.lower()
    widgets = [compute, mode, virtual, donor, expert, keep]
    return Box(f"MultiGPUPlace{kind}", 1, row, widgets, {name: (socket, source)}, (socket,), 200)


def _sampled(model: Link, clip: Link, vae: Link, latent: str, cfg: float) -> list[Box]:
    positive = Box("CLIPTextEncode", 2, 0, ["a house by the sea"], {"clip": ("CLIP", clip)}, ("CONDITIONING",), 160)
    negative = Box("CLIPTextEncode", 2, 6, [""], {"clip": ("CLIP", clip)}, ("CONDITIONING",), 160)
    empty = Box(latent, 2, 12, [1024, 1024, 1], {}, ("LATENT",))
    wires = {"model": ("MODEL", model), "positive": ("CONDITIONING", positive[0]),
             "negative": ("CONDITIONING", negative[0]), "latent_image": ("LATENT", empty[0])}  # fmt: skip
    sampler = Box("KSampler", 3, 0, [1, "fixed", 20, cfg, "euler", "simple", 1.0], wires, ("LATENT",), 260)
    decode = Box("VAEDecode", 3, 9, [], {"samples": ("LATENT", sampler[0]), "vae": ("VAE", vae)}, ("IMAGE",))
    save = Box("SaveImage", 4, 0, ["MultiGPU"], {"images": ("IMAGE", decode[0])}, (), 300)
    return [positive, negative, empty, sampler, decode, save]


def _flux_loaders() -> tuple[Box, Box, Box]:
    return (
        Box("UNETLoader", 0, 0, ["flux1-dev.safetensors", "default"], {}, ("MODEL",)),
        Box(
            "DualCLIPLoader",
            0,
            6,
            ["clip_l.safetensors", "t5xxl_fp16.safetensors", "flux", "default"],
            {},
            ("CLIP",),
            140,
        ),
        Box("VAELoader", 0, 12, ["ae.safetensors"], {}, ("VAE",)),
    )


def one_gpu() -> dict[str, Any]:
    model, clip, vae = _flux_loaders()
    placed = _place("Model", "MODEL", model[0], 0, keep="keep")
    encoder = _place("CLIP", "CLIP", clip[0], 7, compute="cpu")
    boxes = [model, clip, vae, placed, encoder, *_sampled(placed[0], encoder[0], vae[0], "EmptySD3LatentImage", 1.0)]
    return graph(
        boxes,
        "One GPU that is too small for the model. Place Model (auto) leaves as much on the GPU as fits and streams the "
        "rest from RAM; the text encoder computes on the CPU. keep_loaded: the model stays when memory is freed.",
    )


def two_gpus() -> dict[str, Any]:
    model, clip, vae = _flux_loaders()
    placed = _place("Model", "MODEL", model[0], 0, "cuda:0", "expert", expert="cuda:0,60%;cuda:1,40%")
    encoder = _place("CLIP", "CLIP", clip[0], 7, "cuda:1", keep="eject")
    decoder = _place("VAE", "VAE", vae[0], 14, "cuda:1")
    boxes = [model, clip, vae, placed, encoder, decoder]
    boxes += _sampled(placed[0], encoder[0], decoder[0], "EmptySD3LatentImage", 1.0)
    sampler = next(box for box in boxes if box.kind == "KSampler")
    report = Box("MultiGPUMemoryReport", 4, 9, [], {"value": ("*", sampler[0])}, ("*", "STRING"), 260, 560)
    return graph(
        [*boxes, report],
        "Two GPUs. The model computes on cuda:0; 40 % of its weights rest on cuda:1 and are streamed over. Text "
        "encoder and VAE compute on cuda:1. Memory Report shows what rests where. On a machine with other devices, "
        "choose those in the place nodes.",
    )


def virtual_vram() -> dict[str, Any]:
    loader = Box("CheckpointLoaderSimple", 0, 0, ["sd_xl_base_1.0.safetensors"], {}, ("MODEL", "CLIP", "VAE"))
    placed = _place("Model", "MODEL", loader[0], 0, mode="virtual VRAM", virtual=2.0)
    boxes = [loader, placed, *_sampled(placed[0], loader[1], loader[2], "EmptyLatentImage", 6.0)]
    return graph(
        boxes,
        "Virtual VRAM: two gigabytes of the model leave the compute device for RAM, whatever is free. Larger pictures "
        "or batches then fit beside it.",
    )


EXAMPLES = {"One small GPU": one_gpu, "Two GPUs": two_gpus, "Virtual VRAM": virtual_vram}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in EXAMPLES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
