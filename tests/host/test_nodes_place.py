"""The place nodes on the real host: behind stock loaders, drawing what the stock workflow draws."""

from __future__ import annotations

from typing import Any

import pytest

from devtools.client import PromptFailed, RequestFailed, Workflow
from tests.host import workflows
from tests.host.conftest import StartHost
from tests.host.driver import Driver
from tests.host.workflows import placed


def everywhere(workflow: Workflow, **widgets: Any) -> Workflow:
    for what in ("model", "clip", "vae"):
        workflow = placed(workflow, what, **widgets)
    return workflow


def flags(comfy: Driver) -> dict[str, bool | None]:
    return {row["model_class"]: row["flag"] for row in comfy.models()}


@pytest.mark.parametrize(
    "widgets",
    [
        {},
        {"compute_device": "cpu", "mode": "auto"},
        {"mode": "virtual VRAM", "virtual_vram_gb": 0.0},
        {"mode": "virtual VRAM", "virtual_vram_gb": 4.0, "donor_device": "cpu"},
        {"compute_device": "cpu", "mode": "expert", "expert_mode_allocations": "cpu,100%"},
    ],
)
def test_a_placed_workflow_draws_what_the_stock_one_draws(comfy: Driver, widgets: dict[str, Any]) -> None:
    stock = comfy.draw(workflows.flux(seed=31, steps=1))
    comfy.free(unload_models=True, free_memory=True)
    assert comfy.draw(everywhere(workflows.flux(seed=31, steps=1), **widgets)) == stock
    assert "computes on cpu, and all its weights stay there" in comfy.log()


def test_a_checkpoints_three_parts_are_placed(comfy: Driver) -> None:
    stock = comfy.draw(workflows.sd15(seed=32, steps=1))
    workflow = workflows.sd15(seed=32, steps=1)
    for slot, what in enumerate(("model", "clip", "vae")):
        workflow = placed(workflow, what, behind=["checkpoint", slot], compute_device="cpu")
    assert comfy.draw(workflow) == stock


@pytest.mark.parametrize(
    ("said", "flag"), [("keep", False), ("eject", True), ("default", None), (True, False), (False, True)]
)
def test_keep_loaded_flags_the_models(comfy: Driver, said: Any, flag: bool | None) -> None:
    comfy.run(everywhere(workflows.flux(seed=33, steps=1), keep_loaded=said))
    try:
        assert flags(comfy) == {"Flux": flag, "SD3ClipModel_": flag, "TAESD": flag}
    finally:
        comfy.run(everywhere(workflows.flux(seed=33, steps=1), keep_loaded="default"))
        assert set(flags(comfy).values()) == {None}
        comfy.free(unload_models=True, free_memory=True)


def test_a_word_that_keep_loaded_does_not_know_is_refused(comfy: Driver) -> None:
    with pytest.raises(RequestFailed, match="keep_loaded is 'perhaps'; it can be default, keep or eject"):
        comfy.run(everywhere(workflows.flux(seed=34), keep_loaded="perhaps"))


@pytest.mark.parametrize("device", ["cuda:7", "gpu:3", "mps", "xpu:0"])
def test_a_device_that_is_not_here_passes_validation_and_stops_the_run_with_the_list(
    comfy: Driver, device: str
) -> None:
    with pytest.raises(PromptFailed, match=rf"{device} is not on this machine, which has cpu \(.*choose one of them"):
        comfy.run(placed(workflows.flux(seed=35), "model", compute_device=device))


def test_a_donor_that_is_not_here_stops_the_run_with_the_list(comfy: Driver) -> None:
    widgets = {"mode": "expert", "expert_mode_allocations": "cpu,50%;cuda:1,50%"}
    with pytest.raises(PromptFailed, match="cuda:1 is not on this machine, which has cpu"):
        comfy.run(placed(workflows.flux(seed=36), "model", **widgets))


def test_a_text_that_does_not_parse_is_refused_with_the_column(comfy: Driver) -> None:
    widgets = {"mode": "expert", "expert_mode_allocations": "cpu,lots"}
    with pytest.raises(PromptFailed, match=r"column 5 of 'cpu,lots'"):
        comfy.run(placed(workflows.flux(seed=37), "model", **widgets))


def test_falling_back_is_a_setting_and_warns_each_time(start_host: StartHost) -> None:
    own = start_host(environment={"MULTIGPU_FALL_BACK": "on"})
    for seed in (1, 2):
        own.run(placed(workflows.flux(seed=seed, steps=1), "model", compute_device=f"cuda:{seed}"))
    for seed in (1, 2):
        warned = f"[MultiGPU] cuda:{seed} is not on this machine"
        (line,) = [line for line in own.log().splitlines() if warned in line]
        assert "falling back to ComfyUI's default device" in line
    spread = {"mode": "expert", "expert_mode_allocations": "cuda:1,40%;cuda:2,30%;cpu,*"}
    stock = own.draw(workflows.flux(seed=3, steps=1))
    assert own.draw(placed(workflows.flux(seed=3, steps=1), "model", compute_device="cuda:1", **spread)) == stock
    assert "not on this machine: cuda:1, cuda:2; other devices are used" in own.log()
