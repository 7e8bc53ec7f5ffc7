"""The benchmark's models are recognised by ComfyUI, and it measures what it says, on simulated devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.picture.cases import CASES
from tests.engine.pack import Pack
from tests.engine.studio import Studio

pytestmark = pytest.mark.cuda

GPU_SCRIPTS = str(Path(__file__).parents[1] / "gpu")


@pytest.fixture
def bench(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MULTIGPU_BENCH_MODELS", str(tmp_path))
    monkeypatch.syspath_prepend(GPU_SCRIPTS)
    from benchmarks.picture import process

    yield process
    for name in ("bench_host", "bench_models", "benchmarks.picture.process"):
        sys.modules.pop(name, None)


def test_both_sides_draw_the_same_and_say_what_they_took(bench: Any, studio: Studio) -> None:
    case = replace(CASES["wan-16-33"].shrunk(simulate=True), steps=2, lora=True)
    path = bench.bench_models.model_file(case.family, "tiny")
    core, ours = (bench.measure(case, side, path, path) for side in ("static", "ours"))
    assert core["pictures"] == ours["pictures"]
    assert "homed" not in core and 0 < ours["streamed"] == ours["homed"] < ours["model"]
    assert ours["pinned"] >= ours["homed"] and ours["peak"] < core["peak"]
    seconds = ("first", "second", "step", "change", "change_8", "off", "step_off", "on")
    assert all(row[what] > 0 for row in (core, ours) for what in seconds)
    drawn = ours["pictures"]
    assert drawn["first"] == drawn["on"] != drawn["change"]


def test_the_true_shapes_have_the_sizes_of_the_true_models(bench: Any) -> None:
    """Known numbers of weights, in billions."""
    for family, count in (("flux", 11.9), ("wan", 14.3), ("qwen", 20.4)):
        found = sum(math.prod(shape) for _, shape, _ in bench.bench_models.weights(family, "whole"))
        assert found / 1e9 == pytest.approx(count, abs=0.05)
