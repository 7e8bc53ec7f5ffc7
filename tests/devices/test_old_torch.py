"""Spread models without what torch lacked when it was older: on a Mac with torch 2.4, on Intel GPUs with 2.5."""

from __future__ import annotations

import shutil
from pathlib import Path

from devtools.hosts import NEWEST
from tests.devices.conftest import KIND, started
from tests.host.driver import DEBUG_PACKS, Picture
from tests.host.lifecycle import BOTH, flux

MAC_2_4 = """
import torch
for module, name in ((torch, "accelerator"), (torch, "get_device_module"), (torch.mps, "recommended_max_memory")):
    delattr(module, name)
NODE_CLASS_MAPPINGS = {}
"""
INTEL_2_5 = """
import torch

class Event(torch.Event):
    def __new__(cls, enable_timing=False):
        return super().__new__(cls, device="xpu", enable_timing=enable_timing)

    def elapsed_time(self, end_event):
        raise NotImplementedError("elapsed_time is not supported by XPUEvent.")

torch.xpu.Event = Event
for module in (torch.xpu, torch.xpu.memory):
    del module.mem_get_info
NODE_CLASS_MAPPINGS = {}
"""
"""`torch.accelerator` stays: the simulated devices need it, except that of a Mac."""
CASES = {
    "mps": (MAC_2_4, "mps,50%;cpu,50%", "mps "),
    "xpu": (INTEL_2_5, "xpu:0,30%;xpu:1,40%;cpu,*", "xpu:0 6.00 GiB of 6.00 GiB free, xpu:1 6.00 GiB of 6.00 GiB free"),
}


def test_a_spread_model_is_drawn_reported_kept_and_freed(tmp_path: Path) -> None:
    hiding, allocation, free = CASES[KIND]
    shutil.copytree(DEBUG_PACKS, tmp_path / "first", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "first" / "old_torch").mkdir()
    (tmp_path / "first" / "old_torch" / "__init__.py").write_text(hiding)
    with started(NEWEST, tmp_path, first_packs=tmp_path / "first") as machine:
        stock = flux(105)
        stock["sample"]["inputs"]["steps"] = 4
        picture = machine.draw(stock)
        machine.free(**BOTH)
        for said in ("keep", "default"):
            workflow = flux(105, model=said, after="MultiGPUMemoryReport")
            workflow["sample"]["inputs"]["steps"] = 4
            workflow["place_model"]["inputs"] |= {"mode": "expert", "expert_mode_allocations": allocation}
            for seed in (105, 106):
                workflow["sample"]["inputs"]["seed"] = seed
                done = machine.run(workflow)
                machine.wait_idle()
                assert (tuple(map(Picture.decode, done.images)) == picture) == (seed == 105)
                (text,) = done.history["outputs"]["after"]["text"]
                (its,) = (line for line in text.splitlines() if line.startswith(f"- Flux ({said}) "))
                assert " on cpu" in its and its.endswith(" (an estimate)")
        assert machine.held() == [], "default was the last choice"
        device, *_ = machine.client.get("/multigpu/snapshot")["devices"]
        assert device["total"] > device["used"] >= device["ours"] > 0
        with machine.said() as lines:
            machine.free(**BOTH)
        assert sum(" post-gc at " in line and free in line for line in lines) == 1
        assert "error on" not in machine.log(), "no step at the end of a prompt has failed"
