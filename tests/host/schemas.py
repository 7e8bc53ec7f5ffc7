"""What `/object_info` says of a node, reduced to what a saved workflow depends on."""

from __future__ import annotations

from typing import Any

from tests.host.driver import Driver

KEPT = ("default", "min", "max", "step", "multiline")


def schema(info: dict[str, Any]) -> dict[str, Any]:
    """Outputs, and the inputs in the order of their widgets, in the form of the golden files."""
    inputs = []
    for section in ("required", "optional"):
        for name in info["input_order"].get(section, []):
            kind, *rest = info["input"][section][name]
            options = rest[0] if rest else {}
            kind = "COMBO" if isinstance(kind, list) else kind
            inputs.append({"name": name, "section": section, "type": kind} | _kept(options))
    return {"outputs": list(info["output"]), "category": info["category"], "inputs": inputs}


def _kept(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in KEPT if key in options}


def ours(comfy: Driver) -> dict[str, dict[str, Any]]:
    """The nodes of our pack, by id, as `/object_info` lists them."""
    return {
        node_id: info
        for node_id, info in comfy.client.get("/object_info").items()
        if info["python_module"] == "custom_nodes.multigpu"
    }
