"""The text of the Memory Report, line by line."""

from __future__ import annotations

import time
from dataclasses import replace

from multigpu.plan.types import Forecast
from multigpu.telemetry.report import report
from multigpu.telemetry.snapshot import DeviceMemory, ModelMemory, Snapshot

GiB, MiB = 1024**3, 1024**2
NOON = time.mktime((2026, 3, 4, 12, 0, 5, 0, 0, -1))
RAM = DeviceMemory("cpu", 20 * GiB, 32 * GiB)
SPREAD = ModelMemory(
    "Flux", "m7", "cuda:0", 4 * GiB, "keep", {"cpu": 2 * GiB, "cuda:1": 512 * MiB, "cuda:0": 4 * GiB}, False
)
EMPTY = Snapshot("Memory Report", "node 5", NOON, 2 * GiB, (RAM,))


def lines(**changes: object) -> list[str]:
    return report(replace(EMPTY, **changes)).splitlines()


def test_an_empty_machine() -> None:
    assert report(EMPTY).splitlines() == [
        "Memory at 12:00:05",
        "RAM: 12.00 GiB of 32.00 GiB used, 20.00 GiB free; this process 2.00 GiB",
        "Loaded models: none",
        "Held for later prompts: none",
    ]


def test_every_device_has_a_line_with_its_cache() -> None:
    devices = (
        DeviceMemory("cuda:0", 20 * GiB, 24 * GiB, 300 * MiB),
        DeviceMemory("cuda:1", None, 24 * GiB, in_use=False),
        DeviceMemory("directml:0", None, 0),
        RAM,
    )
    assert lines(devices=devices)[2:5] == [
        "cuda:0: 4.00 GiB of 24.00 GiB used, 20.00 GiB free; 300.0 MiB cached by the allocator",
        "cuda:1: 24.00 GiB, not in use by ComfyUI",
        "directml:0: its driver does not report memory",
    ]


def test_a_model_says_where_it_rests_the_compute_device_first() -> None:
    dynamic = ModelMemory("WAN21", "m8", "cuda:1", GiB, "default", {"disk": 3 * GiB, "cuda:1": GiB}, True)
    waiting = ModelMemory("TAESD", "m9", "cuda:0", 0, "eject", {"cpu": 5 * MiB}, False)
    assert lines(models=(SPREAD, dynamic, waiting, replace(SPREAD, loaded=False)), held=2)[2:] == [
        "Loaded models: 3",
        "- Flux (keep) computes on cuda:0: 4.00 GiB on cuda:0, 2.00 GiB on cpu, 512.0 MiB on cuda:1",
        "- WAN21 (default, DynamicVRAM) computes on cuda:1: 1.00 GiB on cuda:1, 3.00 GiB on disk",
        "- TAESD (eject) computes on cuda:0: 5.0 MiB on cpu",
        "Held for later prompts: 2",
    ]


def test_a_model_whose_weights_are_gone() -> None:
    assert "- Flux (keep) computes on cuda:0: no weights" in lines(models=(replace(SPREAD, resting={}),))


def test_a_model_that_is_placed_says_how_long_a_step_takes() -> None:
    placed = replace(SPREAD, resting={"cuda:0": GiB}, forecast=Forecast(0.208, 0.2, (), measured=True))
    assert "- Flux (keep) computes on cuda:0: 1.00 GiB on cuda:0; step 0.208 s" in lines(models=(placed,))


def test_a_model_says_what_is_computed_ahead() -> None:
    forecast = Forecast(0.2, 0.2, (), measured=True)
    placed = replace(SPREAD, resting={"cuda:0": GiB, "cpu": 2 * GiB}, hoisted=GiB, forecast=forecast)
    expected = "; 1.00 GiB of it are computed ahead instead of copied in each step; step 0.2"
    assert any(expected in line for line in lines(models=(placed,)))


def test_a_model_says_what_of_its_streamed_weights_is_on_the_compute_device_too() -> None:
    placed = replace(SPREAD, resting={"cuda:0": GiB, "cpu": 2 * GiB}, retained=GiB // 2)
    expected = (
        "- Flux (keep) computes on cuda:0: 1.00 GiB on cuda:0, 2.00 GiB on cpu; 512.0 MiB of it are on cuda:0, too"
    )
    assert expected in lines(models=(placed,))
