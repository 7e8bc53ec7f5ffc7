"""The Memory Report on the real host: its figures are those that others count."""

from __future__ import annotations

import re

import psutil
import pytest

from devtools.client import Finished, Workflow
from multigpu.units import UNITS, format_bytes, scale_decimal
from tests.host import workflows
from tests.host.driver import Driver
from tests.host.lifecycle import BOTH, Keeper, short
from tests.host.workflows import node

NODE = "MultiGPUMemoryReport"
ALONE = {"report": node(NODE)}


def lines(finished: Finished) -> list[str]:
    (text,) = finished.history["outputs"]["report"]["text"]
    return list(text.splitlines())


def reported(workflow: Workflow) -> Workflow:
    """With a report when the picture is there: all models are loaded then."""
    return {**workflow, "report": node(NODE, value=["decode", 0])}


def size(text: str) -> int:
    """The bytes in the first size of a text."""
    found = re.search(r"([\d.]+) (B|[KMGT]iB)\b", text)
    assert found, text
    return scale_decimal(found[1], UNITS[found[2].lower()])


def test_its_figures_are_those_of_the_process(comfy: Driver) -> None:
    _, ram, count, *models, _held = lines(comfy.run(reported(workflows.flux(seed=51, steps=1))))
    counted = comfy.models()
    assert count == f"Loaded models: {len(counted)}"
    expected = {f"- {row['model_class']} (default) computes on cpu": row["storages"]["cpu"] for row in counted}
    found = {line.rpartition(": ")[0]: line.rpartition(": ")[2] for line in models}
    assert found.keys() == expected.keys()
    for name, told in found.items():
        assert told.endswith(" on cpu") and size(told) == pytest.approx(expected[name], rel=0.01), name
    assert f" of {format_bytes(psutil.virtual_memory().total)} used, " in ram
    assert size(ram.partition("this process ")[2]) == pytest.approx(comfy.memory()["rss"], rel=0.2)


def test_it_runs_every_time_and_passes_its_input_on(comfy: Driver) -> None:
    workflow = workflows.flux(seed=52, steps=1)
    picture = comfy.draw(workflow)
    workflow["report"] = node(NODE, value=["sample", 0])
    workflow["decode"]["inputs"]["samples"] = ["report", 0]
    workflow["show"] = node("PreviewAny", source=["report", 1])
    assert comfy.draw(workflow) == picture
    again = comfy.run(workflow)
    assert "sample" in again.cached_nodes and "report" not in again.cached_nodes
    assert lines(again) == again.history["outputs"]["show"]["text"][0].splitlines()


def test_it_says_what_is_kept_and_how_many_are_held(keeper: Keeper) -> None:
    before = lines(keeper.run(reported(short(53, model="keep", vae="eject"))))
    assert any(line.startswith("- Flux (keep) computes on cpu: ") for line in before)
    assert any(line.startswith("- TAESD (eject) computes on cpu: ") for line in before)
    keeper.free(**BOTH)
    after = lines(keeper.run(ALONE))
    assert [line for line in after if line.startswith("- ")] == [line for line in before if "Flux" in line]
    assert after[-1] == f"Held for later prompts: {len(keeper.held())}" and keeper.held() == ["Flux"]
    told = keeper.client.get("/lifecycle/history")[-1]
    assert told["identifier"] == "Memory Report" and told["tag"] == "now"
    assert told["models"][0]["homes"].keys() == {"cpu"}
