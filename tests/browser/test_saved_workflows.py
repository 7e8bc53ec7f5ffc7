"""Workflows of the archived pack, and our examples, opened in ComfyUI's real frontend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
GGUF = ("UnetLoaderGGUF", "CLIPLoaderGGUF", "UnetLoaderGGUFAdvanced")
"""The loaders of other packs that the server has."""
ARCHIVED: dict[str, Any] = json.loads((GOLDEN / "archived_2_6_core.json").read_text())["core"] | {
    node_id: archived
    for node_id, archived in json.loads((GOLDEN / "archived_2_6_gguf.json").read_text())["gguf"].items()
    if re.sub(r"(DisTorch2?)?MultiGPU$", "", node_id) in GGUF
}
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
SOCKETS = {"MODEL", "CLIP", "VAE"}

LOAD = "workflow => window.app.loadGraphData(workflow)"
DRAWN = """elements => {
    const shown = document.querySelectorAll("[data-node-id]").length;
    return shown === (elements ? window.app.graph._nodes.length : 0);
}"""
READ = """async () => {
    const prompt = await window.app.graphToPrompt();
    return {
        nodes: window.app.graph._nodes.map(node => ({
            type: node.type, missing: !window.LiteGraph.registered_node_types[node.type],
            widgets: Object.fromEntries((node.widgets || []).map(widget => [widget.name, widget.value])),
        })),
        prompt: prompt.output,
    };
}"""


def open_workflow(page: Any, design: str, workflow: dict[str, Any]) -> dict[str, Any]:
    """What the frontend makes of a workflow. Elements of the page could change values when they appear."""
    page.evaluate(LOAD, workflow)
    page.wait_for_function(DRAWN, arg=design == "Nodes 2.0", timeout=60_000)
    opened: dict[str, Any] = page.evaluate(READ)
    return opened


def saved_widgets(node_id: str) -> dict[str, Any]:
    """Widget values that no default has, in the order in which the archived pack saved them."""
    values: dict[str, Any] = {}
    for given in ARCHIVED[node_id]["inputs"]:
        name, kind = given["name"], given["type"]
        if kind in SOCKETS:
            continue
        if kind == "COMBO":
            values[name] = "cuda:3" if name.endswith("device") else f"my {name}.safetensors"
        elif kind == "FLOAT":
            values[name] = given["default"] + 3.5
        elif kind == "BOOLEAN":
            values[name] = not given["default"]
        else:
            values[name] = "cuda:3,25%;cpu,75%"
    return values


def saved_workflow() -> dict[str, Any]:
    nodes = []
    for number, (node_id, archived) in enumerate(ARCHIVED.items(), 1):
        nodes.append(
            {
                "id": number, "type": node_id, "pos": [0, number * 200], "size": [300, 150], "flags": {}, "order": 0,
                "mode": 0, "properties": {"Node name for S&R": node_id},
                "inputs": [
                    {"name": given["name"], "type": given["type"], "link": None}
                    for given in archived["inputs"] if given["type"] in SOCKETS
                ],
                "outputs": [{"name": kind, "type": kind, "links": []} for kind in archived["outputs"]],
                "widgets_values": list(saved_widgets(node_id).values()),
            }
        )  # fmt: skip
    return {
        "last_node_id": len(nodes), "last_link_id": 0, "nodes": nodes, "links": [], "groups": [], "config": {},
        "extra": {}, "version": 0.4,
    }  # fmt: skip


def test_an_archived_workflow_keeps_its_widget_values(page: Any, design: str) -> None:
    opened = open_workflow(page, design, saved_workflow())
    found = {node["type"]: node for node in opened["nodes"]}
    assert found.keys() == ARCHIVED.keys()
    for node_id in ARCHIVED:
        assert not found[node_id]["missing"], f"{node_id} is not known to the frontend"
        saved = saved_widgets(node_id)
        kept = {name: found[node_id]["widgets"][name] for name in saved}
        assert kept == saved, node_id
        if "DisTorch2" in node_id:
            assert found[node_id]["widgets"]["keep_loaded"] == "default"


CHANGE = """async () => {
    const spread = window.app.graph._nodes.flatMap(node => node.widgets.filter(
        widget => widget.name.endsWith("expert_mode_allocations"),
    ));
    const type = (widget, text) => { widget.value = text; widget.callback(text); };
    const before = spread.map(widget => widget.value);
    for (const widget of spread) type(widget, "");
    await new Promise(requestAnimationFrame);
    const hidden = () => window.app.graph._nodes.flatMap(node => node.widgets).filter(widget => widget.hidden).length;
    const counts = [hidden()];
    spread.forEach((widget, index) => type(widget, before[index]));
    await new Promise(requestAnimationFrame);
    return [...counts, hidden()];
}"""
SAVE = "() => window.app.graph.serialize()"


def test_an_archived_workflow_keeps_its_values_through_changes_saving_and_loading(page: Any, design: str) -> None:
    open_workflow(page, design, saved_workflow())
    none_hidden, some_hidden = page.evaluate(CHANGE)
    assert none_hidden == 0 < some_hidden, "an allocation hides the widgets that it makes meaningless"
    saved = page.evaluate(SAVE)
    for node in saved["nodes"]:
        values = list(saved_widgets(node["type"]).values())
        assert node["widgets_values"][: len(values)] == values, node["type"]
        assert len(node["widgets_values"]) == len([*filter(None, widget_names(page, node["type"]))])
    again = open_workflow(page, design, saved)
    for node in again["nodes"]:
        expected = saved_widgets(node["type"])
        assert {name: node["widgets"][name] for name in expected} == expected


def widget_names(page: Any, node_type: str) -> list[str]:
    """The names of a node's widgets that are saved."""
    found = "type => window.LiteGraph.createNode(type).widgets.filter(w => w.serialize !== false).map(w => w.name)"
    return list(page.evaluate(found, node_type))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_opens_and_means_what_its_widgets_say(page: Any, design: str, path: Path) -> None:
    workflow = json.loads(path.read_text())
    opened = open_workflow(page, design, workflow)
    assert [node["type"] for node in opened["nodes"] if node["missing"] and node["type"] != "Note"] == []
    for node in workflow["nodes"]:
        if node["type"].startswith("MultiGPUPlace"):
            inputs = opened["prompt"][str(node["id"])]["inputs"]
            names = (
                "compute_device",
                "mode",
                "virtual_vram_gb",
                "donor_device",
                "expert_mode_allocations",
                "keep_loaded",
            )
            assert [inputs[name] for name in names] == node["widgets_values"]
            assert isinstance(inputs[node["inputs"][0]["name"]], list), "its component is connected"
