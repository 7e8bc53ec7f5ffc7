"""Help pages and labels name exactly the widgets that their node has. (`tests/host` compares them with the schemas.)"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.architecture import ROOT

NODES: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "nodes.json").read_text(encoding="utf-8"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*.md")}
LABELS = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "locales").glob("*/nodeDefs.json")
}


def inputs(node_id: str) -> list[str]:
    return [given["name"] for given in NODES[node_id]["inputs"]]


WIDGETS = {name for node_id in NODES for name in inputs(node_id)}


def widgets_in(text: str) -> set[str]:
    """Every word that can only be a widget's name, and those in backquotes that are some node's."""
    return set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)) | set(re.findall(r"`(\w+)`", text)) & WIDGETS


def by_hand(page: str) -> str:
    """What stands before the list of inputs."""
    return page.partition("\n## Inputs\n")[0]


def test_every_node_has_a_page_and_every_page_a_node() -> None:
    assert PAGES.keys() == NODES.keys()


@pytest.mark.parametrize("node_id", NODES)
def test_a_page_lists_the_inputs_and_outputs_of_its_node(node_id: str) -> None:
    given, _, made = PAGES[node_id].partition("\n## Inputs\n")[2].partition("\n## Outputs\n")
    assert re.findall(r"^- `(\w+)` \(", given, re.MULTILINE) == inputs(node_id)
    assert re.findall(r"^- `\w+` \((.+)\)$", made, re.MULTILINE) == NODES[node_id]["outputs"]


@pytest.mark.parametrize("node_id", NODES)
def test_a_page_speaks_of_no_widget_that_its_node_lacks(node_id: str) -> None:
    assert widgets_in(by_hand(PAGES[node_id])) <= set(inputs(node_id))


def test_a_widget_of_another_node_is_noticed() -> None:
    text = "A text in expert_mode_allocations counts; `device` and `virtual_vram` too, `keep` and a device do not."
    assert widgets_in(text) == {"expert_mode_allocations", "device", "virtual_vram"}


@pytest.mark.parametrize("node_id", NODES)
def test_only_loaders_of_checkpoints_speak_of_the_parts_of_one(node_id: str) -> None:
    several = len(NODES[node_id]["outputs"]) > 1 and "DisTorch2" in node_id
    assert bool(re.search(r"\bVAE stays? on one device\b", by_hand(PAGES[node_id]))) == several


@pytest.mark.parametrize("language", LABELS)
def test_labels_are_those_of_widgets_that_the_node_has(language: str) -> None:
    """The same ones in every language."""
    assert LABELS[language].keys() == NODES.keys()
    for node_id, texts in LABELS[language].items():
        assert set(texts["inputs"]) <= set(inputs(node_id)), node_id
        assert texts["inputs"].keys() == LABELS["en"][node_id]["inputs"].keys(), node_id


def test_every_widget_of_ours_has_a_label() -> None:
    ours = re.compile(r"(device|virtual_vram_gb|allocations|models|keep_loaded|loras)$")
    for node_id, texts in LABELS["en"].items():
        assert {name for name in inputs(node_id) if ours.search(name)} <= texts["inputs"].keys(), node_id
