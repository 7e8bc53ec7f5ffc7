"""What needs a server of its own: GPUs that nobody has used yet, files of all kinds, a server that ends meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devtools import models
from devtools.hosts import Frontend
from devtools.places import Places
from devtools.server import Server, usable_port
from tests.browser.conftest import CHOOSE, SERVE, TAB, opened
from tests.host.driver import PACK, spec_for
from tests.sim import simdev

pytestmark = pytest.mark.once

PROBE = SERVE.parent / "probe_pack"
FILES = {
    "vae/old.pt": b"PK\x03\x04", "vae/damaged.safetensors": b"\xff" * 100, "checkpoints/old.ckpt": b"PK\x03\x04",
}  # fmt: skip
"""Model files whose headers cannot be read."""
ADD = """([loader, file, place]) => {
    window.app.graph.clear();
    const nodes = [loader, place].map(type => window.LiteGraph.createNode(type));
    for (const node of nodes) window.app.graph.add(node);
    nodes[0].widgets[0].value = file;
    const output = nodes[0].outputs.findIndex(output => output.type === nodes[1].inputs[0].type);
    nodes[0].connect(output, nodes[1], 0);
    window.placed = nodes[1];
}"""
CHANGE = """values => Object.entries(values).forEach(([name, value]) => {
    const widget = window.placed.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback(value);
})"""
HEARD = """() => {
    window.heard = 0;
    window.app.api.addEventListener("multigpu.snapshot", () => window.heard++);
}"""
FLUX = ["UNETLoader", "toy_flux.safetensors", "MultiGPUPlaceModel"]


@pytest.fixture(scope="module")
def server(frontend: Frontend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Can be started again at the same address."""
    base = tmp_path_factory.mktemp("own")
    there = models.folder(Places.here())
    for file in [path for path in there.rglob("*") if path.is_file()]:
        link = base / "own_models" / file.relative_to(there)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    for name, content in FILES.items():
        (base / "own_models" / name).write_bytes(content)
    spec = spec_for(
        frontend.host, base, Path(sys.executable), frontend=frontend.files(Places.here()),
        models=base / "own_models", packs={PACK: Places.here().root, "simdev_probe": PROBE}, runner=(str(SERVE),),
        environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g"}, flags=simdev.HOST_FLAGS, port=usable_port(None),
    )  # fmt: skip
    with Server(spec) as running:
        yield running


@contextmanager
def paged(browser: Any, server: Server, stats: Any = None) -> Iterator[Any]:
    """A page of the frontend. With `stats`, that is what it gets for `/system_stats`, and the server is not asked."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    if stats is not None:
        page.route("**/system_stats", lambda asked: asked.fulfill(json=stats))
    opened(page, server)
    page.evaluate(CHOOSE, True)
    yield page
    context.close()


def test_an_open_page_uses_no_gpu_that_comfyui_does_not_use(browser: Any, server: Server) -> None:
    """ComfyUI's own `/system_stats`, which its frontend asks, uses all of them: it is asked before."""
    stats = server.client.get("/system_stats")
    server.client.post("/simdev", {"reset": True})
    with paged(browser, server, stats) as page:
        page.evaluate(HEARD)
        page.evaluate(ADD, FLUX)
        page.locator(".multigpu-split .multigpu-bar").wait_for(timeout=30_000)
        page.locator(TAB).click()
        for index in (1, 2):
            device = page.locator(f".multigpu-device[data-device='cuda:{index}']")
            device.get_by_text("6.00 GiB, not in use by ComfyUI").wait_for(timeout=30_000)
            assert device.locator(".multigpu-segment, .multigpu-free, .multigpu-others").count() == 0
        page.wait_for_function("() => window.heard > 0", timeout=30_000)
        assert {*server.client.get("/simdev")["contexts"]} <= {"cuda:0"}
        page.locator(TAB).click()


def test_files_without_a_header_are_no_errors(browser: Any, server: Server) -> None:
    with paged(browser, server) as page:
        said: list[str] = []
        page.on("console", lambda told: said.append(f"{told.type}: {told.text} {told.location['url']}"))
        for name in FILES:
            folder, _, file = name.partition("/")
            place = "MultiGPUPlaceVAE" if folder == "vae" else "MultiGPUPlaceModel"
            loader = "VAELoader" if folder == "vae" else "CheckpointLoaderSimple"
            page.evaluate(ADD, [loader, file, place])
            note = page.locator(".multigpu-split .multigpu-note", has_text=f"{file} cannot be read before")
            note.wait_for(timeout=30_000)
            assert page.locator(".multigpu-wrong").count() == 0 and note.get_attribute("title")
        assert [text for text in said if "/multigpu/" in text] == []


def test_a_server_that_comes_back_is_asked_again(browser: Any, server: Server) -> None:
    with paged(browser, server) as page:
        page.evaluate(ADD, FLUX)
        bar = page.locator(".multigpu-split .multigpu-bar")
        bar.wait_for(timeout=30_000)
        server.stop()
        page.evaluate(CHANGE, {"mode": "expert", "expert_mode_allocations": "cuda:1,10mb;cuda:2,*"})
        page.locator(".multigpu-wrong", has_text="ComfyUI does not answer.").wait_for(timeout=30_000)
        server.start()
        page.locator(".multigpu-split [data-home='cuda:2'][data-bytes]").wait_for(timeout=60_000)
        assert page.locator(".multigpu-wrong").count() == 0
