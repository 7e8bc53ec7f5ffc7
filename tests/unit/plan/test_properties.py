"""What holds for any text, any model and any quotas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu.errors import AllocationError
from multigpu.plan import (
    CPU,
    Auto,
    Block,
    DeviceBudget,
    Expert,
    Reason,
    VirtualVram,
    default_ring,
    format_request,
    make_plan,
    parse_devices,
    parse_request,
    read_gib,
)
from multigpu.plan.planner import immovable_reasons
from multigpu.plan.quotas import ModelSize, expert_quotas, virtual_quotas
from multigpu.plan.request import Request

from .shapes import GPU0, GPU1, GPU2, budget

ROOT = Path(__file__).parents[3]
PIECES = st.sampled_from(
    [
        "cuda:0",
        "cuda:1",
        "cpu",
        "mps",
        "cuda",
        ",",
        ";",
        "#",
        "*",
        "%",
        "gb",
        "g",
        "b",
        " ",
        "0",
        "1",
        "2.5",
        ".5",
        "50",
        "auto",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=14).map("".join))
DEVICES = st.sampled_from(["cuda:0", "cuda:1", "cuda:2", "cpu"])
NUMBERS = st.decimals(0, 999, places=3).map(str)
AMOUNTS = {
    "bytes": st.tuples(NUMBERS, st.sampled_from(["b", "k", "kb", "mb", "GB", "gib", "t"])).map("".join),
    "ratio": NUMBERS.map(lambda n: f"{n}1%"),
    "fraction": st.decimals(0, 1, places=4).map(str),
}


@st.composite
def allocations(draw: st.DrawFn) -> str:
    """Well-formed expert texts of every mode, with and without stars."""
    amounts = AMOUNTS[draw(st.sampled_from(sorted(AMOUNTS)))]
    devices = draw(st.lists(DEVICES, min_size=1, max_size=4, unique=True))
    parts = [f"{device},{draw(amounts)}{draw(st.sampled_from(['', '', '*']))}" for device in devices]
    if draw(st.booleans()):
        parts[-1] = f"{devices[-1]},*"
    return ";".join(parts)


@settings(max_examples=400)
@given(TEXTS)
def test_any_text_parses_or_raises_allocation_error(text: str) -> None:
    for read in (parse_request, parse_devices, read_gib):
        try:
            result = read(text)
        except AllocationError:
            continue
        assert result is not None


@settings(max_examples=400)
@given(st.one_of(TEXTS, allocations(), allocations().map(lambda text: f"{text}#cuda:0;4.0;cpu")))
def test_formatting_is_a_fixed_point(text: str) -> None:
    try:
        request = parse_request(text)
    except AllocationError:
        return
    canonical = format_request(request)
    assert parse_request(canonical) == request
    assert format_request(parse_request(canonical)) == canonical


@given(allocations())
def test_well_formed_allocations_parse(text: str) -> None:
    parse_request(text)


@st.composite
def models(draw: st.DrawFn) -> list[Block]:
    kinds = st.sampled_from([None, None, None, Reason.TIED, Reason.NOT_CASTABLE])
    seconds = st.one_of(st.none(), st.floats(0, 1))
    sizes = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
    return [Block(f"b{i}", size, compute=draw(seconds), immovable=draw(kinds)) for i, size in enumerate(sizes)]


def size_of(blocks: list[Block]) -> ModelSize:
    fixed = immovable_reasons(blocks)
    movable = [block.bytes for block, reason in zip(blocks, fixed, strict=True) if reason is None]
    total = sum(block.bytes for block in blocks)
    largest = max(movable, default=0)
    return ModelSize(total, total - sum(movable), largest, default_ring(largest, sum(movable)))


ROOMY = [budget(device, 10**15) for device in (GPU0, GPU1, GPU2, CPU)]
KNOWN = {offer.device: offer for offer in ROOMY}
VIRTUAL = st.builds(
    VirtualVram, st.integers(0, 10**7), st.lists(st.sampled_from([GPU1, GPU2, CPU]), min_size=1, unique=True).map(tuple)
)


@given(models(), st.one_of(allocations().map(parse_request), VIRTUAL))
def test_bytes_sum_and_no_quota_is_exceeded_by_a_block(blocks: list[Block], request: Request) -> None:
    size = size_of(blocks)
    if isinstance(request, VirtualVram):
        quotas = virtual_quotas(request, size, KNOWN, GPU0)
    else:
        assert isinstance(request, Expert)
        quotas = expert_quotas(request, size, KNOWN, GPU0)
    plan = make_plan(request, blocks, ROOMY, GPU0)
    assert sum(plan.bytes_by_home().values()) == plan.total_bytes == size.total
    assert sorted(p.block for p in plan.placements) == sorted(block.name for block in blocks)
    assert plan.bytes_on(GPU0) <= quotas[GPU0]
    for device, count in plan.bytes_by_home().items():
        assert count <= quotas[device] + max(0, size.largest - 1)
    for block in blocks:
        assert block.immovable is None or plan[block.name].home == GPU0
    assert make_plan(request, list(blocks), ROOMY, GPU0) == plan
    data = json.loads(json.dumps(plan.to_json()))
    assert [(p["block"], p["bytes"], p["home"], p["reason"]) for p in data["placements"]] == [
        (p.block, p.bytes, str(p.home), p.reason.value) for p in plan.placements
    ]


FREE = st.integers(0, 2 * 10**7)


@given(models(), st.one_of(st.just(Auto()), st.builds(Auto, st.integers(0, 10**6)), VIRTUAL), FREE, FREE, FREE)
def test_a_plan_fits_into_the_free_memory_or_is_refused(
    blocks: list[Block], request: Request, free0: int, free1: int, free_cpu: int
) -> None:
    budgets = [DeviceBudget(GPU0, 2 * 10**7, free0), budget(GPU1, free1), budget(GPU2, 0), budget(CPU, free_cpu, 1e9)]
    try:
        plan = make_plan(request, blocks, budgets, GPU0)
    except AllocationError:
        return
    for offer in budgets:
        ring = plan.ring_bytes if offer.device == GPU0 else 0
        assert plan.bytes_on(offer.device) + ring <= offer.free
    if isinstance(request, Auto) and request.reserve is not None:
        assert plan.bytes_on(GPU0) + plan.ring_bytes + request.reserve <= free0


PROGRAM = """
import json
from multigpu.plan import make_plan, parse_request
from tests.unit.plan.shapes import GPU0, flux_blocks, roomy
for text in ("cuda:0,40%;cuda:1,25%;cpu,35%", "#;9gb;cuda:1,cpu", "auto"):
    print(json.dumps(make_plan(parse_request(text), flux_blocks(), roomy(), GPU0).to_json()))
"""


def test_the_same_plan_in_every_process() -> None:
    """Sets and hashes differ between these processes; the plans do not."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "424242")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 3
