"""Take the pictures of the panel for README and docs in ComfyUI's own frontend: `python -m scripts.pictures CHROMIUM`.

Beside them lies a digest of the scripts, the style sheet and the texts that they show.

ComfyUI runs a workflow on three simulated GPUs, with a model that has the shapes of a small Flux and weights of zero.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from devtools import models
from devtools.hosts import NEWEST
from devtools.places import Places
from devtools.server import Server
from scripts.examples import Box, graph
from tests.browser.conftest import TAB
from tests.host.driver import Driver, spec_for
from tests.sim import simdev

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "assets"
SIZE = {"width": 1440, "height": 860}
NAMES = ("panel.png", "panel_light.png", "wrong_allocation.png")
DIGEST = "pictures.sha256"
SETTLED = 1500
"""Milliseconds until the frontend has moved its own bars away."""
MODEL, TINY = "small_flux.safetensors", "diffusion_models/toy_flux.safetensors"
WIDER = 6
"""How many times wider than the tiny Flux of the tests the model is."""
FIXED = ("img_in.", "txt_in.", "_in.in_layer.")
"""Layers whose inputs are not as wide as the model."""


def digest() -> str:
    """Of everything that the pictures are made of."""
    texts = [*sorted(ROOT.glob("web/*.js")), ROOT / "web" / "multigpu.css", ROOT / "locales" / "en" / "main.json"]
    return hashlib.sha256("".join(path.read_text(encoding="utf-8") for path in texts).encode()).hexdigest() + "\n"


def small_flux(path: Path) -> None:
    """A model file of the tiny Flux's layers, wider, with a hole for data: all zeros, and no bytes on the disk."""
    with models.folder(Places.here()).joinpath(TINY).open("rb") as tiny:
        header = json.loads(tiny.read(struct.unpack("<Q", tiny.read(8))[0]))
    header.pop("__metadata__", None)
    end = 0
    for name, tensor in header.items():
        shape = [size * WIDER if size >= 256 else size for size in tensor["shape"]]
        if any(part in name for part in FIXED) and len(shape) == 2:
            shape[1] = tensor["shape"][1]
        count = 2
        for size in shape:
            count *= size
        tensor |= {"shape": shape, "data_offsets": [end, end + count], "dtype": "BF16"}
        end += count
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def model_folder(folder: Path) -> Path:
    source = models.folder(Places.here())
    for name in ("text_encoders/toy_clip_l.safetensors", "vae/toy_taef1.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(source / name)
    (folder / "diffusion_models").mkdir(parents=True, exist_ok=True)
    small_flux(folder / "diffusion_models" / MODEL)
    return folder


def workflow() -> dict[str, Any]:
    model = Box("UNETLoader", 0, 0, [MODEL, "default"], {}, ("MODEL",))
    clip = Box("CLIPLoader", 0, 5, ["toy_clip_l.safetensors", "sd3", "default"], {}, ("CLIP",), 110)
    vae = Box("VAELoader", 0, 10, ["toy_taef1.safetensors"], {}, ("VAE",), 70)
    widgets = ["cuda:0", "expert", 4.0, "cpu", "cuda:0,30%;cuda:1,35%;cpu,*", "keep"]
    placed = Box("MultiGPUPlaceModel", 1, 0, widgets, {"model": ("MODEL", model[0])}, ("MODEL",), 220)
    encoder = ["cuda:1", "auto", 4.0, "cpu", "", "default"]
    placed_clip = Box("MultiGPUPlaceCLIP", 1, 8, encoder, {"clip": ("CLIP", clip[0])}, ("CLIP",), 180)
    wire = {"clip": ("CLIP", placed_clip[0])}
    text = Box("CLIPTextEncode", 1, 15, ["a house by the sea"], wire, ("CONDITIONING",), 110)
    latent = Box("EmptySD3LatentImage", 0, 14, [64, 64, 1], {}, ("LATENT",), 110)
    wires = {"model": ("MODEL", placed[0]), "positive": ("CONDITIONING", text[0]),
             "negative": ("CONDITIONING", text[0]), "latent_image": ("LATENT", latent[0])}  # fmt: skip
    sampler = Box("KSampler", 2, 0, [1, "fixed", 4, 1.0, "euler", "simple", 1.0], wires, ("LATENT",), 260)
    decode = Box("VAEDecode", 2, 9, [], {"samples": ("LATENT", sampler[0]), "vae": ("VAE", vae[0])}, ("IMAGE",), 60)
    save = Box("SaveImage", 2, 12, ["panel"], {"images": ("IMAGE", decode[0])}, (), 60)
    made = graph([model, clip, vae, placed, placed_clip, text, latent, sampler, decode, save], "")
    made["nodes"] = [node for node in made["nodes"] if node["type"] != "Note"]
    return made


SHOW = """async ([workflow, palette, elements]) => {
    const settings = window.app.extensionManager.setting;
    for (const name of ["Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu", "Comfy.Minimap.Visible"])
        await settings.set(name, false);
    await settings.set("Comfy.VueNodes.Enabled", elements);
    await settings.set("Comfy.ColorPalette", palette);
    await window.app.loadGraphData(workflow);
    const canvas = window.app.canvas;
    canvas.ds.scale = 0.95;
    canvas.ds.offset = [440, 130];
    canvas.draw(true, true);
}"""


def take(page: Page, driver: Driver, folder: Path) -> None:
    """The three pictures of the docs."""

    def show(palette: str, elements: bool) -> None:
        page.evaluate(SHOW, [workflow(), palette, elements])
        page.wait_for_timeout(SETTLED)

    show("dark", True)
    page.evaluate("() => window.app.queuePrompt(0)")
    driver.wait_idle(300)
    page.locator(TAB).click()
    page.locator(".multigpu-model").first.wait_for()
    page.wait_for_timeout(SETTLED)
    page.get_by_text("Job completed").wait_for(state="hidden")
    page.screenshot(path=folder / NAMES[0])
    show("light", False)
    strip = page.locator(".multigpu-model .multigpu-strip").first
    strip.focus()
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    page.screenshot(path=folder / NAMES[1])
    show("dark", True)
    node = page.locator("[data-node-id]", has_text="Place Model")
    node.locator("input").last.fill("cuda:0,30%;cuda:9,*")
    page.locator(".multigpu-wrong").wait_for()
    node.screenshot(path=folder / NAMES[2])


def take_all(browser: Browser, folder: Path) -> None:
    """Start ComfyUI, and take the pictures in its frontend. Writes them into `folder`."""
    simdev.build("cuda")
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as files:
        spec = spec_for(
            NEWEST,
            Path(base),
            Path(sys.executable),
            models=model_folder(Path(files)),
            runner=(str(Path(simdev.__file__).parents[1] / "serve.py"),),
            environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:3g"},
            flags=simdev.HOST_FLAGS,
        )
        with Server(spec) as server:
            page = browser.new_page(viewport=SIZE)
            page.goto(server.client.address, wait_until="domcontentloaded", timeout=120_000)
            page.wait_for_function(
                "window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100",
                timeout=120_000,
            )
            take(page, Driver(server), folder)
            page.close()
    (folder / DIGEST).write_text(digest())


def main(chromium: str) -> None:
    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        take_all(browser, FOLDER)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
