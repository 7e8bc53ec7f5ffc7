"""Take the thumbnails of the example workflows in ComfyUI's own frontend: `python -m scripts.thumbnails CHROMIUM`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from devtools.hosts import NEWEST
from devtools.server import Server
from scripts.examples import FOLDER
from tests.host.driver import spec_for

SIZE = {"width": 1280, "height": 720}

SHOW = """async (workflow) => {
    const settings = window.app.extensionManager.setting;
    for (const name of ["Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu", "Comfy.Minimap.Visible"])
        await settings.set(name, false);
    window.app.extensionManager.focusMode = true;
    await window.app.loadGraphData(workflow);
    const canvas = window.app.canvas;
    const boxes = window.app.graph._nodes.map(node => node.getBounding());
    const left = Math.min(...boxes.map(b => b[0])) - 40, top = Math.min(...boxes.map(b => b[1])) - 40;
    const right = Math.max(...boxes.map(b => b[0] + b[2])) + 40, bottom = Math.max(...boxes.map(b => b[1] + b[3])) + 40;
    canvas.ds.scale = Math.min(innerWidth / (right - left), innerHeight / (bottom - top));
    canvas.ds.offset = [-left, -top];
    canvas.draw(true, true);
}"""
SETTLED = 1500
"""Milliseconds until the frontend has put the texts of the nodes over the canvas and its own bars are gone."""

FILES = {
    "diffusion_models": "flux1-dev", "text_encoders": "clip_l", "vae": "ae", "checkpoints": "sd_xl_base_1.0",
}  # fmt: skip
"""Empty files of these names, so that the pictures show no missing model."""


def models(folder: Path) -> Path:
    for kind, name in [*FILES.items(), ("text_encoders", "t5xxl_fp16")]:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / f"{name}.safetensors").touch()
    return folder


def main(chromium: str) -> None:
    with (
        tempfile.TemporaryDirectory() as base,
        tempfile.TemporaryDirectory() as files,
        Server(spec_for(NEWEST, Path(base), Path(sys.executable), models=models(Path(files)))) as server,
        sync_playwright() as session,
    ):
        browser = session.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)
        page.goto(server.client.address, wait_until="domcontentloaded", timeout=120_000)
        page.wait_for_function(
            "window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100",
            timeout=120_000,
        )
        for path in sorted(FOLDER.glob("*.json")):
            page.evaluate(SHOW, json.loads(path.read_text(encoding="utf-8")))
            page.wait_for_timeout(SETTLED)
            page.screenshot(path=path.with_suffix(".jpg"), type="jpeg", quality=80)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
