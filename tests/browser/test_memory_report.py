"""The Memory Report's text, on its node in ComfyUI's real frontend."""

from __future__ import annotations

from typing import Any

QUEUE = """async () => {
    window.app.graph.clear();
    const node = window.LiteGraph.createNode("MultiGPUMemoryReport");
    node.pos = [200, 150];
    window.app.graph.add(node);
    Object.assign(window.app.canvas.ds, {scale: 1, offset: [60, 20]});
    await window.app.queuePrompt(0);
}"""
SHOWN = """() => {
    const box = document.querySelector("textarea[placeholder^='Run the workflow']");
    return box?.value.startsWith("Memory at ") && box.value;
}"""
SAVED = "async () => [window.app.graph.serialize(), (await window.app.graphToPrompt()).output]"


def test_the_report_is_read_on_the_node_and_not_saved(page: Any) -> None:
    page.evaluate(QUEUE)
    text = page.wait_for_function(SHOWN, timeout=60_000).json_value()
    assert text.splitlines()[-1].startswith("Held for later prompts: ")
    box = page.locator("textarea[placeholder^='Run the workflow']")
    box.wait_for(state="visible", timeout=30_000)
    assert not box.is_editable()
    room = box.evaluate("box => [box.clientHeight, box.scrollHeight]")
    assert room[0] >= room[1], "all lines of a short report are seen without scrolling"
    assert "Memory at " not in str(page.evaluate(SAVED))
