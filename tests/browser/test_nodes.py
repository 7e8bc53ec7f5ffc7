"""A node of ours as the user sees it in ComfyUI's real frontend, and its help page."""

from __future__ import annotations

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


def test_the_devices_of_a_combo_say_what_they_are_and_keep_their_ids(page: Any) -> None:
    page.evaluate(ADD)
    page.wait_for_function("() => window.placed.widgets[0].options.getOptionLabel")
    labels = page.evaluate(
        "() => window.placed.widgets[0].options.values.map(window.placed.widgets[0].options.getOptionLabel)"
    )
    ids = page.evaluate("() => window.placed.widgets[0].options.values")
    assert ids == ["default", "cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert labels[1] == "cuda:0 (Simulated CUDA 0, 6.00 GiB)"
    assert labels[0] == "default"


def test_the_help_page_of_a_node_is_shown(page: Any) -> None:
    page.evaluate(ADD)
    page.get_by_test_id("info-button").click(timeout=60_000)
    shown = page.locator(".node-help-content", has_text="moves a fixed number of gigabytes")
    shown.wait_for(state="visible", timeout=60_000)
    assert shown.locator("li", has_text="expert_mode_allocations").is_visible()
    widths = shown.evaluate("page => [page, ...page.querySelectorAll('*')].map(e => [e.clientWidth, e.scrollWidth])")
    assert [width for width in widths if width[0] and width[0] < width[1]] == [], "nothing is cut off on the right"
