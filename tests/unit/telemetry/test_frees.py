"""The history of frees: newest first, with what came back up to the last moment that was seen."""

from __future__ import annotations

from multigpu.telemetry.frees import KEPT, Fate, Freed, FreeHistory
from multigpu.telemetry.snapshot import DeviceMemory, Snapshot


def memory(process: int, *free: int | None) -> Snapshot:
    gpus = [DeviceMemory(f"cuda:{number}", count, 100) for number, count in enumerate(free)]
    return Snapshot("", "", 0.0, process, (*gpus, DeviceMemory("cpu", 5, 10)))


def freed(time: float) -> Freed:
    return Freed(
        time, False, (Fate("Flux", "set to eject"), Fate("VAE", "set to eject")), (Fate("CLIP", "set to keep"),)
    )


def test_what_came_back_is_what_was_seen_last() -> None:
    history = FreeHistory()
    counts = [history.changes]
    history.begin(memory(1000, 10, 50), freed(1.0))
    counts.append(history.changes)
    history.note(memory(900, 30, 50))
    history.note(memory(400, 80, 40))
    assert counts + [history.changes] == [0, 1, 3]
    assert history.to_json() == {
        "version": 2,
        "frees": [{
            "time": 1.0, "free_memory": False,
            "ejected": [{"name": "Flux", "reason": "set to eject"}, {"name": "VAE", "reason": "set to eject"}],
            "retained": [{"name": "CLIP", "reason": "set to keep"}],
            "returned": {"cuda:0": 70, "cuda:1": 0, "cpu": 600},
        }],
    }  # fmt: skip


def test_a_device_that_does_not_tell_is_left_out() -> None:
    """Its driver tells nothing, or the process did not use it before or does not after."""
    history = FreeHistory()
    history.begin(memory(10, None, 5, None), freed(1.0))
    history.note(memory(20, None, None, 5))
    assert history.to_json()["frees"][0]["returned"] == {"cpu": 0}


def test_the_newest_come_first_and_the_oldest_are_forgotten() -> None:
    history = FreeHistory()
    history.note(memory(1))  # nothing was freed yet
    for number in range(KEPT + 5):
        history.begin(memory(1), freed(float(number)))
    times = [free["time"] for free in history.to_json()["frees"]]
    assert times == [float(number) for number in range(KEPT + 4, 4, -1)]


def test_the_words_for_the_log() -> None:
    assert freed(1.0).words() == "Flux, VAE unloaded (set to eject); CLIP stays (set to keep)"
    assert Freed(1.0, True, (), ()).words() == "no model is loaded"
