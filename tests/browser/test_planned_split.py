"""The planned split on a node, before anything runs: as the user types, through other nodes, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ADD = """() => {
    window.app.graph.clear();
    const add = (type, x) => {
        const node = window.LiteGraph.createNode(type);
        node.pos = [x, 150];
        window.app.graph.add(node);
        return node;
    };
    const loader = add("UNETLoader", 40), lora = add("LoraLoaderModelOnly", 400);
    const place = add("MultiGPUPlaceModel", 760);
    loader.widgets[0].value = "toy_flux.safetensors";
    loader.connect(0, lora, 0);
    lora.connect(0, place, 0);
    const mode = place.widgets.find(widget => widget.name === "mode");
    mode.value = "expert";
    mode.callback("expert");
    Object.assign(window.app.canvas.ds, {scale: 1, offset: [60, 20]});
    window.app.canvas.draw(true, true);
    window.placed = place;
    return place.id;
}"""
PLACE_OF_TEXT = """() => {
    const widget = window.placed.widgets.find(widget => widget.name === "expert_mode_allocations");
    const box = window.app.canvas.canvas.getBoundingClientRect();
    const [x, y] = window.app.canvas.ds.convertOffsetToCanvas([
        window.placed.pos[0] + window.placed.size[0] / 2, window.placed.pos[1] + widget.last_y + 10,
    ]);
    return [box.left + x, box.top + y];
}"""
SPLIT = """() => Object.fromEntries([...document.querySelectorAll(".multigpu-split [data-bytes]")].map(
    part => [part.dataset.home, Number(part.dataset.bytes)],
))"""


@pytest.fixture
def typed(page: Any, design: str) -> Callable[[str], None]:
    """Types an allocation into a new place node behind a loader and a LoRA."""
    node = page.evaluate(ADD)

    def into(text: str) -> None:
        if design == "classic":
            page.wait_for_function("() => window.placed.widgets[4].last_y > 0")
            page.mouse.click(*page.evaluate(PLACE_OF_TEXT))
            box = page.locator(".graphdialog .value")
            box.fill(text)
            box.press("Enter")
        else:
            page.locator(f"[data-node-id='{node}'] input").last.fill(text)

    return into


def test_the_split_is_shown_as_the_user_types(page: Any, typed: Callable[[str], None]) -> None:
    typed("cuda:0,2.5gb;cpu,*")
    bar = page.locator(".multigpu-split .multigpu-bar")
    bar.wait_for(timeout=30_000)
    whole = page.evaluate(SPLIT)
    assert whole.keys() == {"cuda:0"}, "the tiny model is smaller than 2.5 GB"
    typed("cuda:0,10mb;cpu,*")
    page.locator(".multigpu-split [data-home='cpu'][data-bytes]").wait_for(timeout=30_000)
    split = page.evaluate(SPLIT)
    assert split.keys() == {"cuda:0", "cpu"} and sum(split.values()) == whole["cuda:0"]
    assert split["cuda:0"] <= 10 * 1024**2
    assert bar.get_attribute("aria-label") == (
        f"Planned split: cuda:0 {split['cuda:0'] / 1024**2:.1f} MiB, cpu {split['cpu'] / 1024**2:.1f} MiB"
    )
    page.evaluate("() => { window.placed.graph._nodes[0].widgets[0].value = 'toy_wan.safetensors'; }")
    page.wait_for_function(
        f"before => JSON.stringify(({SPLIT})()) !== JSON.stringify(before)", arg=split, timeout=30_000
    )


@pytest.mark.parametrize(
    ("text", "marked"),
    [("cuda:0,2.5gb;cpu,nonsense", "nonsense"), ("cuda:0,10mb;cuda:9,*", "cuda:9"), ("what", "what")],
)
def test_a_wrong_text_is_marked_where_it_is_wrong(
    page: Any, typed: Callable[[str], None], text: str, marked: str
) -> None:
    typed(text)
    wrong = page.locator(".multigpu-wrong", has=page.get_by_text(text, exact=True))
    wrong.wait_for(timeout=30_000)
    assert wrong.locator("mark").inner_text() == marked
    assert marked in wrong.locator("span").inner_text(), "the message"
    typed("cpu,*")
    wrong.wait_for(state="detached", timeout=30_000)


def test_a_node_without_a_loader_says_what_to_do(page: Any, typed: Callable[[str], None]) -> None:
    typed("cpu,*")
    page.evaluate("() => window.placed.disconnectInput(0)")
    page.locator(".multigpu-note", has_text="Connect a loader").wait_for(timeout=30_000)


OTHERS = """() => {
    window.app.graph.clear();
    const add = (type, column, row, values) => {
        const node = window.LiteGraph.createNode(type);
        node.pos = [40 + 360 * column, 60 + 320 * row];
        window.app.graph.add(node);
        for (const [name, value] of Object.entries(values)) {
            const widget = node.widgets.find(widget => widget.name === name);
            widget.value = value;
            widget.callback?.(value);
        }
        return node;
    };
    const expert = { mode: "expert", expert_mode_allocations: "cuda:1,1mb;cpu,*" };
    const spread = { unet_name: "toy_flux.safetensors", expert_mode_allocations: "cuda:1,1mb;cpu,*" };
    const clip = add("CLIPLoader", 0, 0, { clip_name: "toy_clip_l.safetensors" });
    const vae = add("VAELoader", 0, 1, { vae_name: "toy_taef1.safetensors" });
    const dot = add("Reroute", 1, 0, {});
    const nodes = [add("MultiGPUPlaceCLIP", 2, 0, expert), add("MultiGPUPlaceVAE", 2, 1, expert),
                   add("UNETLoaderDisTorch2MultiGPU", 0, 2, spread)];
    clip.connect(0, dot, 0);
    dot.connect(0, nodes[0], 0);
    vae.connect(0, nodes[1], 0);
    window.planned = nodes.map(node => node.widgets.find(widget => widget.name === "multigpu_split"));
}"""
PLANNED = """() => window.planned.map(widget => Object.fromEntries(
    [...widget.element.querySelectorAll("[data-bytes]")].map(part => [part.dataset.home, Number(part.dataset.bytes)]),
))"""


def test_loaders_text_encoders_and_vaes_have_a_split_too_and_reroutes_are_followed(page: Any) -> None:
    page.evaluate(OTHERS)
    page.wait_for_function(f"() => ({PLANNED})().every(split => split.cpu > 0)", timeout=30_000)
    clip, vae, model = page.evaluate(PLANNED)
    assert all(split.keys() <= {"cuda:0", "cuda:1", "cpu"} for split in (clip, vae, model))
    assert sum(vae.values()) < sum(model.values()) and sum(clip.values()) > 100_000_000
