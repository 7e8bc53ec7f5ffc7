"""Ids and schemas of our nodes: those of the archived pack as they were, all of them frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from devtools.hosts import NEWEST, Host
from scripts.help_pages import generated
from tests.host import schemas
from tests.host.driver import Driver

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHIVED: dict[str, Any] = json.loads((GOLDEN / "archived_2_6_core.json").read_text())["core"]
FROZEN: dict[str, Any] = json.loads((GOLDEN / "nodes.json").read_text())


def test_every_node_of_the_archived_pack_is_here_with_its_widgets(comfy: Driver) -> None:
    """Same names, order, sections, types and defaults; what is new comes after what was there."""
    here = schemas.ours(comfy)
    for node_id, archived in ARCHIVED.items():
        found = schemas.schema(here[node_id])
        assert found["outputs"] == archived["outputs"], node_id
        assert found["inputs"][: len(archived["inputs"])] == archived["inputs"], node_id


def test_what_was_added_to_them_is_optional_and_known(comfy: Driver) -> None:
    here = schemas.ours(comfy)
    for node_id, archived in ARCHIVED.items():
        added = schemas.schema(here[node_id])["inputs"][len(archived["inputs"]) :]
        names = [given["name"] for given in added]
        assert all(given["section"] == "optional" for given in added), node_id
        if "Triple" in node_id or "Quadruple" in node_id:
            continue  # the archived ones could not run: they had none of the widgets
        assert names == (["keep_loaded"] if "DisTorch2" in node_id else []), node_id


def test_they_are_deprecated_and_the_place_nodes_are_not(comfy: Driver) -> None:
    for node_id, info in schemas.ours(comfy).items():
        assert bool(info.get("deprecated")) == (node_id in ARCHIVED), node_id


def test_ids_and_schemas_are_frozen(comfy: Driver) -> None:
    """Changed on purpose? `python -m scripts.help_pages` writes the files anew: look at the difference."""
    assert {node_id: schemas.schema(info) for node_id, info in schemas.ours(comfy).items()} == FROZEN


def test_every_widget_has_a_tooltip_and_every_node_a_description(comfy: Driver) -> None:
    for node_id, info in schemas.ours(comfy).items():
        assert info["description"], node_id
        for section in info["input"].values():
            for name, spec in section.items():
                ours = name.endswith(("device", "virtual_vram_gb", "allocations", "models", "keep_loaded", "loras"))
                assert not ours or node_id == "DeviceSelectorMultiGPU" or spec[1].get("tooltip"), f"{node_id} {name}"


def test_help_pages_and_labels_are_those_of_the_schemas(comfy: Driver, host: Host) -> None:
    """`python -m scripts.help_pages` writes them anew."""
    if host != NEWEST:
        pytest.skip("they are generated on the newest ComfyUI")
    for path, content in generated(schemas.ours(comfy)).items():
        assert path.read_text(encoding="utf-8") == content, path


def test_the_host_serves_help_pages_labels_and_example_workflows(comfy: Driver) -> None:
    page = comfy.client.raw("/extensions/multigpu/docs/MultiGPUPlaceModel.md").decode()
    assert page.startswith("# Place Model\n")
    labels = comfy.client.get("/i18n")
    assert labels["zh"]["nodeDefs"]["MultiGPUPlaceModel"]["inputs"]["compute_device"]["name"] == "计算设备"
    assert labels["de"]["nodeDefs"]["MultiGPUPlaceModel"]["display_name"] == "Modell platzieren"
    assert set(comfy.client.get("/workflow_templates")["multigpu"]) == {
        path.stem for path in (GOLDEN.parents[1] / "example_workflows").glob("*.json")
    }
