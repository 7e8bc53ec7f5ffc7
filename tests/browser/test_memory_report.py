"""The Memory Report's text, on its node in ComfyUI's real frontend."""

from __future__ import annotations

from typing import Any

QUEUE = """async () => {
    window.app.graph.clear();
    const node = window.LiteGraph.createNode("MultiGPUMemoryReport");
    window.app.graph.add(node);
    await window.app.queuePrompt(0);
}"""
SHOWN = """() => {
    const [node] = window.app.graph._nodes;
    const texts = (node.widgets || []).map(widget => String(widget.value));
    return texts.find(text => text.startsWith("Memory at "));
}"""


def test_the_report_is_read_on_the_node(page: Any) -> None:
    page.evaluate(QUEUE)
    text = page.wait_for_function(SHOWN, timeout=60_000).json_value()
    assert text.splitlines()[-1].startswith("Held for later prompts: ")
    page.get_by_text("Loaded models: ").first.wait_for(state="visible", timeout=30_000)
