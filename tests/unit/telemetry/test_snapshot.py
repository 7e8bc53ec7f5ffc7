"""Snapshots as lines and as JSON, and a history that does not grow."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import pytest

from multigpu.telemetry import recorder as recorder_module
from multigpu.telemetry.recorder import Recorder
from multigpu.telemetry.snapshot import DeviceMemory, ModelMemory, Snapshot

GiB = 1024**3


def snapshot(identifier: str = "free 3", tag: str = "post-unload") -> Snapshot:
    return Snapshot(
        identifier, tag, 1.5, 2 * GiB, 12 * GiB, 32 * GiB, (DeviceMemory("cuda:0", 20 * GiB, 24 * GiB, 0),),
        (ModelMemory("Flux", 7, "cuda:0", 4 * GiB, "keep", {"cuda:0": 4 * GiB, "cpu": 2 * GiB}, False),), 1,
    )  # fmt: skip


def test_the_line_says_everything_a_person_looks_for() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(1.5))
    assert snapshot().line() == (
        f"free 3 post-unload at {at}: process 2.00 GiB, RAM 12.00 GiB of 32.00 GiB, "
        "cuda:0 20.00 GiB of 24.00 GiB free; loaded: Flux (keep, cuda:0); held: 1"
    )


def test_a_device_that_does_not_tell_its_memory_is_not_full() -> None:
    line = replace(snapshot(), devices=(DeviceMemory("directml:0", 0, 0),)).line()
    assert ", directml:0 unknown; loaded: " in line


def test_the_json_is_one_line_with_every_field() -> None:
    text = snapshot().json()
    assert "\n" not in text
    told = json.loads(text)
    assert told["identifier"] == "free 3" and told["tag"] == "post-unload"
    assert told["devices"] == [{"device": "cuda:0", "free": 20 * GiB, "total": 24 * GiB, "cached": 0}]
    assert told["models"][0] == {
        "name": "Flux", "id": 7, "device": "cuda:0", "loaded_bytes": 4 * GiB, "standing": "keep",
        "resting": {"cuda:0": 4 * GiB, "cpu": 2 * GiB}, "dynamic": False,
    }  # fmt: skip


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
