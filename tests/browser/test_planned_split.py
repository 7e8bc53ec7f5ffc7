"""The planned split on a node, before anything runs: as the user types, through other nodes, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from devtools.server import Server
from tests.browser.test_panel import workflow
from tests.browser.test_saved_workflows import LOAD
from tests.host.driver import Driver

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


UNKNOWN = """([own, behind]) => {
    window.app.graph.clear();
    const nodes = [own, behind].filter(Boolean).map(type => window.LiteGraph.createNode(type));
    for (const node of nodes) window.app.graph.add(node);
    if (behind) nodes[0].connect(0, nodes[1], 0);
}"""


@pytest.mark.parametrize(
    "nodes", [["DiffusersLoaderDisTorch2MultiGPU", None], ["DiffusersLoader", "MultiGPUPlaceModel"]], ids=str
)
def test_a_loader_whose_file_is_not_known_is_not_said_to_be_missing(page: Any, nodes: list[str | None]) -> None:
    page.evaluate(UNKNOWN, nodes)
    known = page.get_by_text("The split is known when the workflow runs.", exact=True)
    known.wait_for(timeout=30_000)
    if nodes[1]:
        page.evaluate("() => window.app.graph._nodes.at(-1).disconnectInput(0)")
        page.locator(".multigpu-note", has_text="Connect a loader").wait_for(timeout=30_000)
        page.evaluate("() => window.app.graph._nodes[0].connect(0, window.app.graph._nodes[1], 0)")
        known.wait_for(timeout=30_000)


PARTS = """() => {
    window.app.graph.clear();
    const node = window.LiteGraph.createNode("CheckpointLoaderAdvancedDisTorch2MultiGPU");
    window.app.graph.add(node);
    window.change = (name, value) => {
        const widget = node.widgets.find(widget => widget.name === name);
        widget.value = value;
        widget.callback(value);
    };
    window.change("ckpt_name", "toy_sd15.safetensors");
    window.change("unet_expert_mode_allocations", "cuda:0,*");
}"""
BARS = """() => [...document.querySelectorAll(".multigpu-split .multigpu-bar")].map(
    bar => [bar.previousSibling.textContent, [...bar.children].map(part => part.dataset.home)],
)"""


def test_each_part_of_a_checkpoint_has_a_split_and_errors_of_its_own(page: Any) -> None:
    page.evaluate(PARTS)
    for allocation, homes in (("cuda:2,*", ["cuda:2"]), ("cuda:1,50%;cpu,*", ["cuda:1", "cpu"])):
        homes = ["cuda:0", *homes]  # its table of tokens stays where it computes
        page.evaluate("text => window.change('clip_expert_mode_allocations', text)", allocation)
        expected = [["Diffusion model", ["cuda:0"]], ["Text encoder", homes]]
        page.wait_for_function(
            f"expected => JSON.stringify(({BARS})()) === JSON.stringify(expected)", arg=expected, timeout=30_000
        )
    page.evaluate("text => window.change('clip_expert_mode_allocations', text)", "cpu,nonsense!!")
    wrong = page.locator(".multigpu-split .multigpu-wrong")
    wrong.wait_for(timeout=30_000)
    assert wrong.locator("mark").inner_text() == "nonsense!!"
    assert page.evaluate(BARS) == [["Diffusion model", ["cuda:0"]]], "of which nothing is wrong"


SET = "([name, value]) => window.app.extensionManager.setting.set(name, value)"


def test_a_setting_changes_what_is_wrong(page: Any, typed: Callable[[str], None]) -> None:
    typed("cuda:0,10mb;cuda:9,*")
    wrong = page.locator(".multigpu-wrong")
    wrong.wait_for(timeout=30_000)
    try:
        page.evaluate(SET, ["MultiGPU.FallBack", True])
        page.locator(".multigpu-split [data-home='cpu'][data-bytes]").wait_for(timeout=30_000)
        assert wrong.count() == 0
    finally:
        page.evaluate(SET, ["MultiGPU.FallBack", False])
    wrong.wait_for(timeout=30_000)


def test_after_a_run_the_step_is_the_measured_one(page: Any, server: Server) -> None:
    driver = Driver(server)
    driver.free(unload_models=True, free_memory=True)
    drawn = workflow(8)
    (sampler,) = [node for node in drawn["nodes"] if node["type"] == "KSampler"]
    sampler["widgets_values"][2] = 8
    page.evaluate(LOAD, drawn)
    split = page.locator(".multigpu-split")
    split.get_by_text(" per step, estimated").wait_for(timeout=30_000)
    page.evaluate("() => window.app.queuePrompt(0)")
    split.get_by_text(" per step, measured").wait_for(timeout=60_000)
    driver.wait_idle()
    (step,) = [its["step"] for its in driver.client.get("/multigpu/snapshot")["models"] if its["name"] == "Flux"]
    assert split.get_by_text(f"{1000 * step['measured']:.2g} ms per step, measured").is_visible()


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
