"""Snapshots as lines and as JSON, and a history that does not grow."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import pytest

from multigpu.plan.types import CPU, DeviceId, Forecast, Placement, Plan, Reason
from multigpu.telemetry import recorder as recorder_module
from multigpu.telemetry.recorder import Recorder
from multigpu.telemetry.snapshot import (
    NOISE,
    DeviceMemory,
    LinkSpeed,
    ModelMemory,
    Snapshot,
    step,
    told_forecast,
    with_ours,
)

GiB, MiB = 1024**3, 1024**2
CUDA = DeviceId("cuda", 0)
PLAN = Plan(
    CUDA,
    (
        Placement("one", 3 * GiB, CUDA, CUDA, Reason.RESIDENT),
        Placement("two", 2 * GiB, CPU, CUDA, Reason.STREAMED),
        Placement("three", GiB, CUDA, CUDA, Reason.LOW_INTENSITY),
    ),
    512 * MiB,
)
FLUX = ModelMemory(
    "Flux", "m7", "cuda:0", 4 * GiB, "keep", {"cuda:0": 4 * GiB, "cpu": 2 * GiB}, False, file="flux.safetensors",
    placed=True, plan=PLAN, retained=256 * MiB, ring=512 * MiB, used=1.25, forecast=Forecast(0.5, 0.4, (), True, 0.45),
)  # fmt: skip


RAM = DeviceMemory("cpu", 20 * GiB, 32 * GiB)


def snapshot(identifier: str = "free 3", tag: str = "post-unload") -> Snapshot:
    devices = DeviceMemory("cuda:0", 20 * GiB, 24 * GiB, MiB, "Some GPU"), RAM
    models = (
        FLUX,
        replace(
            FLUX,
            id="m8",
            name="VAE",
            resting={"cpu": MiB},
            plan=None,
            retained=0,
            ring=0,
            loaded=False,
            forecast=Forecast(0.6, 0.4, (), True),
        ),
    )
    links = (LinkSpeed("cpu", "cuda:0", 25e9),)
    elsewhere = (DeviceMemory("ray://b/cpu", 5 * GiB, 8 * GiB, state="lost"),)
    return Snapshot(identifier, tag, 1.5, 2 * GiB, with_ours(devices, models), models, 1, links, elsewhere, 3)


def test_the_line_says_everything_a_person_looks_for() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(1.5))
    assert snapshot().line() == (
        f"free 3 post-unload at {at}: process 2.00 GiB, RAM 12.00 GiB of 32.00 GiB, "
        "cuda:0 20.00 GiB of 24.00 GiB free; loaded: Flux (keep, cuda:0); held: 1"
    )


def test_a_device_that_does_not_tell_its_memory_is_not_full() -> None:
    line = replace(snapshot(), devices=(DeviceMemory("directml:0", None, 0), RAM)).line()
    assert ", directml:0 unknown; loaded: " in line


def test_the_json_is_one_line_without_the_blocks() -> None:
    text = snapshot().json()
    assert "\n" not in text
    told = json.loads(text)
    assert told.pop("identifier") == "free 3" and told.pop("tag") == "post-unload"
    whole = snapshot().to_json()
    for model in whole["models"]:
        del model["blocks"]
    assert told == whole


def test_a_forecast_that_another_machine_has_told_is_the_same_here() -> None:
    for forecast in (Forecast(0.5, 0.5, (), True, 0.45), Forecast(0.6, 0.6, ())):
        assert told_forecast(step(forecast)) == forecast


def test_every_figure_is_in_the_json() -> None:
    assert json.loads(json.dumps(snapshot().to_json())) == {
        "version": 2, "time": 1.5, "process": 2 * GiB, "held": 1,
        "devices": [
            {"id": "cuda:0", "name": "Some GPU", "total": 24 * GiB, "in_use": True, "used": 4 * GiB,
             "ours": 4 * GiB + 768 * MiB, "others": 0, "cached": MiB},
            {"id": "cpu", "name": "", "total": 32 * GiB, "in_use": True, "used": 12 * GiB, "ours": 2 * GiB + MiB,
             "others": 10 * GiB - MiB, "cached": 0},
        ],
        "models": [
            {"id": "m7", "name": "Flux", "file": "flux.safetensors", "standing": "keep", "placed": True,
             "dynamic": False, "loaded": True, "compute": "cuda:0", "homes": {"cuda:0": 4 * GiB, "cpu": 2 * GiB},
             "retained": 256 * MiB, "hoisted": 0, "ring": 512 * MiB, "streamed": 2 * GiB - 256 * MiB, "used": 1.25,
             "step": {"forecast": 0.45, "measured": 0.5},
             "blocks": [["one", 3 * GiB, "cuda:0", "resident"], ["two", 2 * GiB, "cpu", "streamed"],
                        ["three", GiB, "cuda:0", "low_intensity"]]},
            {"id": "m8", "name": "VAE", "file": "flux.safetensors", "standing": "keep", "placed": True,
             "dynamic": False, "loaded": False, "compute": "cuda:0", "homes": {"cpu": MiB}, "retained": 0, "hoisted": 0,
             "ring": 0, "streamed": 0, "used": 1.25, "step": {"forecast": 0.6, "measured": None},
             "blocks": []},
        ],
        "links": [{"from": "cpu", "to": "cuda:0", "speed": 25e9}],
        "elsewhere": [
            {"id": "ray://b/cpu", "name": "", "total": 8 * GiB, "in_use": True, "used": 3 * GiB, "ours": 0,
             "others": 3 * GiB, "cached": 0, "state": "lost"},
        ],
        "frees": 3,
    }  # fmt: skip


def test_unknown_memory_is_null() -> None:
    told = DeviceMemory("directml:0", None, 0, ours=5).to_json()
    assert (told["total"], told["used"], told["ours"], told["others"]) == (None, None, 5, None)
    idle = DeviceMemory("cuda:1", None, 24 * GiB, in_use=False)
    told = idle.to_json()
    assert (told["total"], told["in_use"], told["used"], told["others"]) == (24 * GiB, False, None, None)
    assert idle.words() == "cuda:1 24.00 GiB, not in use"


def test_only_what_people_would_see_is_a_difference() -> None:
    now = snapshot()
    gpu, ram = now.devices
    assert not replace(now, time=9.0, tag="later").differs(now)
    for other in (
        replace(now, held=2),
        replace(now, links=()),
        replace(now, models=now.models[:1]),
        replace(now, models=(replace(FLUX, standing="eject"), now.models[1])),
        replace(now, models=(replace(FLUX, retained=0), now.models[1])),
        replace(now, devices=(replace(gpu, ours=1), ram)),
        replace(now, devices=(replace(gpu, in_use=False), ram)),
        replace(now, devices=(ram,)),
        replace(now, elsewhere=(replace(now.elsewhere[0], state="ready"),)),
        replace(now, elsewhere=()),
    ):
        assert other.differs(now) and now.differs(other)


def test_figures_change_all_the_time_and_are_no_difference() -> None:
    now = snapshot()
    (gpu, ram), (there,) = now.devices, now.elsewhere
    for other in (
        replace(now, process_bytes=now.process_bytes + NOISE),
        replace(now, devices=(replace(gpu, free=20 * GiB - NOISE), ram)),
        replace(now, devices=(replace(gpu, cached=MiB + NOISE), ram)),
        replace(now, elsewhere=(replace(there, free=5 * GiB + NOISE),)),
    ):
        assert not other.differs(now)
        assert other.far_from(now, NOISE - 1) and now.far_from(other, NOISE - 1) and not other.far_from(now, NOISE)
    assert now.figures_to_json() == {
        "time": 1.5, "process": 2 * GiB, "devices": [[4 * GiB, MiB], [12 * GiB, 0], [3 * GiB, 0]],
    }  # fmt: skip
    idle = replace(gpu, free=None, cached=0, in_use=False)
    assert replace(now, devices=(idle, ram)).figures_to_json()["devices"][0] == [None, 0]


def test_the_history_is_bounded_and_in_order(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "KEPT", 3)
    caplog.set_level(logging.INFO, "test.recorder")
    recorder = Recorder(snapshot, logging.getLogger("test.recorder"))
    for number in range(5):
        recorder.take("free", str(number))
    assert [kept.tag for kept in recorder.history()] == ["2", "3", "4"]
    assert [kept.tag for kept in recorder.history(2)] == ["3", "4"]
    assert recorder.history(0) == []
    assert len(caplog.messages) == 5


def test_a_line_of_json_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "test.recorder")
    Recorder(snapshot, logging.getLogger("test.recorder")).take("free", "now", as_json=True)
    (message,) = caplog.messages
    assert json.loads(message.removeprefix("[MultiGPU] "))["tag"] == "now"
