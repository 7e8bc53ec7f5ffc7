"""The benchmark's models are recognised by ComfyUI, and it measures what it says, on simulated devices."""

from __future__ import annotations

import json
import math
import os
import subprocess
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

ROOT = Path(__file__).parents[2]
GPU_SCRIPTS = str(ROOT / "tests" / "gpu")


@pytest.fixture
def bench(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MULTIGPU_BENCH_MODELS", str(tmp_path))
    monkeypatch.syspath_prepend(GPU_SCRIPTS)
    from benchmarks.picture import process

    yield process
    for name in ("bench_host", "bench_models", "benchmarks.picture.process", "benchmarks.picture.memory"):
        sys.modules.pop(name, None)


def test_both_sides_draw_the_same_and_say_what_they_took(bench: Any, studio: Studio) -> None:
    case = replace(CASES["wan-16-33"].shrunk(simulate=True), steps=2, lora=True)
    path = bench.bench_models.model_file(case.family, "tiny")
    core, ours = (bench.measure(case, side, path, path)[0] for side in ("static", "ours"))
    assert core["pictures"] == ours["pictures"]
    assert "homed" not in core and 0 < ours["streamed"] == ours["homed"] < ours["model"]
    assert ours["pinned"] >= ours["homed"]
    assert ours["peak"] < core["peak"] + ours["homed"], "of a tiny model, ring and casts take about what is away"
    seconds = ("first", "second", "step", "change", "change_8", "off", "step_off", "on", "second_first_step")
    assert all(row[what] > 0 for row in (core, ours) for what in seconds)
    for row in (core, ours):
        assert row["load"] + row.get("place", 0.0) + row["prepare"] + row["first_step"] < row["first"]
        assert row["second_first_step"] + (case.steps - 1) * row["step"] < row["second"]
        assert row["free_least"] <= row["free"] and row["ram_first"] <= row["ram_peak"]
    drawn = ours["pictures"]
    assert drawn["first"] == drawn["on"] != drawn["change"]


def test_the_true_shapes_have_the_sizes_of_the_true_models(bench: Any) -> None:
    """Known numbers of weights, in billions."""
    for family, count in (("flux", 11.9), ("wan", 14.3), ("qwen", 20.4)):
        found = sum(math.prod(shape) for _, shape, _ in bench.bench_models.weights(family, "whole"))
        assert found / 1e9 == pytest.approx(count, abs=0.05)


def test_a_lora_is_for_all_weights_with_two_dimensions(bench: Any) -> None:
    path = bench.bench_models.model_file("flux", "tiny")
    linears = {
        f"diffusion_model.{name.removesuffix('.weight')}": shape
        for name, shape, _ in bench.bench_models.weights("flux", "tiny")
        if len(shape) == 2
    }
    tensors = bench.lora_tensors(path, 4)
    assert {name.rsplit(".lora_", 1)[0] for name in tensors} == linears.keys() and len(tensors) == 2 * len(linears)
    assert "diffusion_model.img_in" in linears
    for name, (out, into) in linears.items():
        assert tensors[f"{name}.lora_A.weight"].shape == (bench.RANK, into)
        assert tensors[f"{name}.lora_B.weight"].shape == (out, bench.RANK)


def test_the_command_measures_and_reports(tmp_path: Path) -> None:
    file, script = tmp_path / "whole.json", ROOT / "benchmarks" / "time_to_picture.py"
    command = [sys.executable, str(script), "--simulate", "--sides", "ours"]
    command += ["--cases", "wan-16-1", "--json", str(file)]
    environment = {**os.environ, "MULTIGPU_BENCH_MODELS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    resident, ours = results["rows"]
    assert (resident["case"], resident["side"], ours["case"], ours["side"]) == ("wan-1", "core", "wan-16-1", "ours")
    assert resident["pictures"] == ours["pictures"]
    assert len({picture["sha256"] for picture in ours["pictures"].values()}) == 3
    (part,) = results["parts"]
    assert part["command"].endswith(" ".join(command[2:])) and part["machine"]["gpu"] == "Simulated CUDA 0"
    assert "| pictures that differ from core's | wan-16-1 | 0.000 | 0 | yes |" in done.stdout
    assert "| s/step, of max(T, bytes that do not fit / B) | wan-16-1 | not measured | 1.03 | **no** |" in done.stdout
    assert " held, 5 not measured." in done.stdout
    assert not list(tmp_path.glob("*.safetensors")), "model files are deleted"
