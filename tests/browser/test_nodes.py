"""A node of ours as the user sees it in ComfyUI's real frontend, and its help page."""

from __future__ import annotations

import re
from typing import Any

import pytest

from devtools.hosts import Frontend
from devtools.places import Places

ADD = """() => {
    window.app.graph.clear();
    const node = window.LiteGraph.createNode("MultiGPUPlaceModel");
    node.pos = [400, 150];
    window.app.graph.add(node);
    Object.assign(window.app.canvas.ds, {scale: 1, offset: [60, 20]});
    window.app.canvas.draw(true, true);
    window.app.canvas.selectNode(node);
    window.placed = node;
    const saved = node.widgets.filter(widget => widget.serialize !== false);
    return Object.fromEntries(saved.map(widget => [widget.label, widget.value]));
}"""
WIDGETS = {
    "compute device": "default", "mode": "auto", "virtual VRAM (GB)": 4, "donor": "cpu", "allocation": "",
    "keep loaded": "default",
}  # fmt: skip
ALWAYS = ["compute device", "mode", "keep loaded"]
USED = {
    "auto": ALWAYS,
    "virtual VRAM": [*ALWAYS[:2], "virtual VRAM (GB)", "donor", *ALWAYS[2:]],
    "expert": [*ALWAYS[:2], "allocation", *ALWAYS[2:]],
}
CHOOSE_MODE = """mode => {
    const widget = window.placed.widgets.find(widget => widget.name === "mode");
    widget.value = mode;
    widget.callback(mode);
}"""
SHOWN = {
    "Nodes 2.0": """([labels, expected]) => {
        const texts = document.querySelector("[data-node-id]").innerText.split("\\n");
        return String(texts.filter(text => labels.includes(text))) === String(expected);
    }""",
    "classic": """([labels, expected]) => {
        const seen = window.placed.widgets.filter(widget => window.placed.isWidgetVisible(widget));
        return String(seen.map(widget => widget.label).filter(text => labels.includes(text))) === String(expected);
    }""",
}
"""Whether the labels of the widgets that can be seen are the expected ones, by design of nodes. What is drawn on a
canvas cannot be read, so the frontend is asked which it draws."""
SAVED = "() => window.placed.serialize().widgets_values"
ON_THE_PAGE = """node => [node.innerText.split("\\n"), [...node.querySelectorAll("input")].map(input => input.value)]"""


def test_the_frontend_is_the_one_that_is_pinned(page: Any, frontend: Frontend) -> None:
    assert page.evaluate("window.__COMFYUI_FRONTEND_VERSION__") == frontend.version(Places.here())


def test_a_node_has_its_widgets_with_labels_and_defaults(page: Any, design: str) -> None:
    assert page.evaluate(ADD) == WIDGETS
    if design == "Nodes 2.0":  # what is drawn on a canvas cannot be read
        texts, _ = page.locator("[data-node-id]").evaluate(ON_THE_PAGE)
        assert texts.count("default") == 2 and texts.count("auto") == 1, "the choices"


@pytest.mark.parametrize("mode", USED)
def test_a_node_shows_only_the_widgets_that_its_mode_uses(page: Any, design: str, mode: str) -> None:
    saved = page.evaluate(ADD)
    for chosen in ("expert" if mode == "auto" else "auto", mode):
        page.evaluate(CHOOSE_MODE, chosen)
        page.wait_for_function(SHOWN[design], arg=[[*WIDGETS], USED[chosen]], timeout=30_000)
    assert page.evaluate(SAVED) == [*(saved | {"mode": mode}).values()], "hidden widgets keep their values"


LISTS = {"classic": ".litecontextmenu .litemenu-entry", "Nodes 2.0": "[role='option']"}
"""The entries of a list that is open, by design of nodes."""
PLACE_OF_COMBO = """() => {
    const node = window.placed, widget = node.widgets[0], canvas = window.app.canvas;
    const box = canvas.canvas.getBoundingClientRect();
    const [x, y] = canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] + widget.last_y + 10]);
    return [box.left + x, box.top + y];
}"""
LABELS = [
    "default", "cuda:0 (Simulated CUDA 0, 6.00 GiB)", "cuda:1 (Simulated CUDA 1, 6.00 GiB)",
    "cuda:2 (Simulated CUDA 2, 6.00 GiB)",
]  # fmt: skip


def test_the_list_of_devices_says_what_they_are_and_a_choice_is_an_id(page: Any, design: str) -> None:
    page.evaluate(ADD)
    if design == "classic":
        page.wait_for_function("() => window.placed.widgets[0].last_y > 0")
        page.mouse.click(*page.evaluate(PLACE_OF_COMBO))
    else:
        page.locator("[data-node-id] [role='combobox']").first.click()
    entries = page.locator(LISTS[design])
    entries.first.wait_for(timeout=30_000)
    *shown, ram = [text.strip() for text in entries.all_inner_texts()]
    assert shown == LABELS and re.fullmatch(r"cpu \(.+, [\d.]+ GiB\)", ram)
    entries.nth(2).click()
    page.wait_for_function("() => window.placed.widgets[0].value === 'cuda:1'", timeout=30_000)
    ids = page.evaluate("() => window.placed.widgets[0].options.values")
    assert ids == ["default", "cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert page.evaluate(SAVED)[0] == "cuda:1"


def test_the_help_page_of_a_node_is_shown(page: Any) -> None:
    page.evaluate(ADD)
    page.get_by_test_id("info-button").click(timeout=60_000)
    shown = page.locator(".node-help-content", has_text="moves a fixed number of gigabytes")
    shown.wait_for(state="visible", timeout=60_000)
    assert shown.locator("li", has_text="expert_mode_allocations").is_visible()
    widths = shown.evaluate("page => [page, ...page.querySelectorAll('*')].map(e => [e.clientWidth, e.scrollWidth])")
    assert [width for width in widths if width[0] and width[0] < width[1]] == [], "nothing is cut off on the right"
