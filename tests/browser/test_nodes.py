"""A node of ours as the user sees it in ComfyUI's real frontend, and its help page."""

from __future__ import annotations

from typing import Any

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
    return Object.fromEntries(node.widgets.map(widget => [widget.label, widget.value]));
}"""
WIDGETS = {
    "compute device": "default", "mode": "auto", "virtual VRAM (GB)": 4, "donor": "cpu", "allocation": "",
    "keep loaded": "default",
}  # fmt: skip
ON_THE_PAGE = """node => [node.innerText.split("\\n"), [...node.querySelectorAll("input")].map(input => input.value)]"""


def test_the_frontend_is_the_one_that_is_pinned(page: Any, frontend: Frontend) -> None:
    assert page.evaluate("window.__COMFYUI_FRONTEND_VERSION__") == frontend.version(Places.here())


def test_a_node_has_its_widgets_with_labels_and_defaults(page: Any, design: str) -> None:
    assert page.evaluate(ADD) == WIDGETS
    if design == "Nodes 2.0":  # what is drawn on a canvas cannot be read
        texts, typed = page.locator("[data-node-id]").evaluate(ON_THE_PAGE)
        assert [text for text in texts if text in WIDGETS] == [*WIDGETS], "the labels, in their order"
        assert texts.count("default") == 2 and texts.count("auto") == 1, "the choices"
        assert typed == ["4.0", "cpu", ""], "what can be typed"


def test_the_help_page_of_a_node_is_shown(page: Any) -> None:
    page.evaluate(ADD)
    page.get_by_test_id("info-button").click(timeout=60_000)
    shown = page.locator(".node-help-content", has_text="moves a fixed number of gigabytes")
    shown.wait_for(state="visible", timeout=60_000)
    assert shown.locator("li", has_text="expert_mode_allocations").is_visible()
    widths = shown.evaluate("page => [page, ...page.querySelectorAll('*')].map(e => [e.clientWidth, e.scrollWidth])")
    assert [width for width in widths if width[0] and width[0] < width[1]] == [], "nothing is cut off on the right"
