"""`make_plan` from end to end, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from multigpu.errors import AllocationError, DoesNotFit, InputError, UnknownDevice
from multigpu.plan import (
    CPU,
    Auto,
    Block,
    DeviceBudget,
    DeviceId,
    Reason,
    VirtualVram,
    default_ring,
    explain,
    make_plan,
    parse_request,
    possible_donors,
)
from multigpu.plan.planner import execution_order, immovable_reasons
from multigpu.plan.types import UNKNOWN
from multigpu.units import GIB, KIB, MIB

from .shapes import FLUX_LINK, GPU0, GPU1, GPU2, blocks_of, budget, flux_blocks, homes, roomy, total_bytes


def test_half_of_four_blocks_to_the_cpu() -> None:
    plan = make_plan(parse_request("cuda:0,50%;cpu,50%"), blocks_of(100, 100, 100, 100), roomy(), GPU0, ring_bytes=100)
    assert plan.bytes_by_home() == {GPU0: 200, CPU: 200}
    assert plan.total_bytes == 400
    assert plan.ring_bytes == 100
    assert [p.block for p in plan.placements] == ["b0", "b1", "b2", "b3"]
    assert all(p.runs_on == GPU0 for p in plan.placements)
    assert {p.reason for p in plan.streamed} == {Reason.STREAMED}


def test_order_of_the_text_decides_who_fills_first() -> None:
    blocks = blocks_of(*[100] * 6)
    first = make_plan(parse_request("cuda:1,300b;cuda:0,300b;cpu,*"), blocks, roomy(), GPU0)
    second = make_plan(parse_request("cuda:0,500b;cuda:1,300b;cpu,*"), blocks, roomy(), GPU0)
    assert first.bytes_by_home() == {GPU0: 300, GPU1: 300}
    assert second.bytes_by_home() == {GPU0: 500, GPU1: 100}


def test_the_compute_device_never_holds_more_than_its_quota() -> None:
    """250 bytes stay means that two blocks of 100 stay and four leave."""
    plan = make_plan(parse_request("cuda:0,250b;cpu,*"), blocks_of(*[100] * 6), roomy(), GPU0)
    assert plan.bytes_by_home() == {GPU0: 200, CPU: 400}


def test_virtual_vram_larger_than_the_model_moves_all_that_can() -> None:
    blocks = [*blocks_of(100, 100), Block("tied", 100, immovable=Reason.TIED)]
    plan = make_plan(VirtualVram(4 * GIB, (CPU,)), blocks, roomy(), GPU0)
    assert homes(plan) == {"b0": "cpu", "b1": "cpu", "tied": "cuda:0"}
    assert plan["tied"].reason is Reason.TIED


def test_no_virtual_vram_keeps_the_model_where_it_computes() -> None:
    plan = make_plan(VirtualVram(0, (CPU,)), blocks_of(100, 100), roomy(), GPU0)
    assert plan.bytes_by_home() == {GPU0: 200}
    assert plan.streamed == ()
    assert plan.ring_bytes == 0
    assert plan.forecast is not None and plan.forecast.slowdown == 1.0


def test_the_plan_is_in_order_of_execution() -> None:
    blocks = [Block("late", 10, order=5), Block("behind late", 10), Block("early", 10, order=1)]
    plan = make_plan(parse_request("cpu,*"), blocks, roomy(), GPU0)
    assert [p.block for p in plan.placements] == ["early", "late", "behind late"]
    assert [p.block for p in plan.streamed] == ["early", "late", "behind late"]
    assert [b.name for b in execution_order([Block("a", 1), Block("b", 1, order=0), Block("c", 1)])] == ["a", "b", "c"]


def test_learned_times_change_the_plan() -> None:
    """Two of four blocks leave: those that compute, because they hide the copies."""
    request = parse_request("cuda:0,50%;cpu,50%")
    for busy in ({"b0", "b2"}, {"b1", "b3"}):
        blocks = [Block(f"b{i}", MIB, compute=1e-3 if f"b{i}" in busy else 1e-9) for i in range(4)]
        plan = make_plan(request, blocks, roomy(), GPU0)
        assert {p.block for p in plan.streamed} == busy
        assert {p.reason for p in plan.placements if p.block not in busy} == {Reason.LOW_INTENSITY}


def test_unknown_times_are_estimated_from_the_known_ones() -> None:
    plan = make_plan(parse_request("cpu,*"), [Block("a", 100, compute=2.0), Block("b", 300)], roomy(), GPU0)
    assert plan.forecast is not None and plan.forecast.compute == pytest.approx(8.0)
    plan = make_plan(parse_request("cpu,*"), blocks_of(10**9, 10**9), roomy(), GPU0)
    assert plan.forecast is not None and plan.forecast.compute == pytest.approx(0.02)


def test_tiny_blocks_stay() -> None:
    """1 % of the model may be tiny: a hundred norms of 4 KiB are, a model of nothing but small blocks has none."""
    norms = [Block(f"norm{i}", 4 * KIB) for i in range(100)]
    linears = [Block(f"linear{i}", 64 * MIB) for i in range(4)]
    plan = make_plan(parse_request("cpu,*"), [*norms, *linears], roomy(), GPU0)
    assert plan.bytes_on(GPU0) == 400 * KIB
    assert plan["norm7"].reason is Reason.TINY
    assert immovable_reasons([Block(f"small{i}", 4 * KIB) for i in range(1000)]) == [None] * 1000
    assert immovable_reasons([Block("nothing", 0)]) == [Reason.TINY]
    assert immovable_reasons([]) == []
    assert immovable_reasons([Block("a", 1, immovable=Reason.EMBEDDING), *linears])[0] is Reason.EMBEDDING


def test_all_sizes_up_to_the_tiny_limit_count_together() -> None:
    """10, 20 and 1000 bytes beside 299 kB: 1 % is 3 kB, so all are tiny. With 500 of the last, that size is not."""
    big = [Block("big", 299_000)]
    few = [Block("a", 10), Block("b", 20), Block("c", 1000)]
    assert immovable_reasons([*few, *big]) == [Reason.TINY] * 3 + [None]
    many = [Block(f"c{i}", 1000) for i in range(500)]
    assert immovable_reasons([*few[:2], *many, *big]) == [Reason.TINY] * 2 + [None] * 501


def test_a_model_of_nothing_has_a_plan() -> None:
    plan = make_plan(parse_request("cuda:0,50%;cpu,50%"), [], roomy(), GPU0)
    assert plan.placements == ()
    assert plan.total_bytes == 0


def test_the_default_ring_is_small_for_small_models() -> None:
    assert default_ring(largest=100 * MIB, movable=20 * GIB) == 512 * MIB
    assert default_ring(largest=10 * MIB, movable=800 * MIB) == 100 * MIB
    assert default_ring(largest=300 * MIB, movable=20 * GIB) == 600 * MIB


def test_auto_keeps_a_model_that_fits_where_it_computes() -> None:
    budgets = [budget(GPU0, 24 * GIB), budget(CPU, 64 * GIB)]
    plan = make_plan(Auto(), blocks_of(*[GIB] * 20), budgets, GPU0)
    assert plan.bytes_by_home() == {GPU0: 20 * GIB}


def test_auto_leaves_the_reserve_free() -> None:
    """20 GiB on 16: 3 GiB stay free, 2 GiB stage (two blocks), 11 GiB stay, 9 GiB leave."""
    budgets = [budget(GPU0, 16 * GIB), budget(CPU, 64 * GIB)]
    plan = make_plan(Auto(3 * GIB), blocks_of(*[GIB] * 20), budgets, GPU0)
    assert plan.bytes_by_home() == {GPU0: 11 * GIB, CPU: 9 * GIB}
    assert plan.bytes_on(GPU0) + plan.ring_bytes + 3 * GIB <= 16 * GIB


def test_auto_uses_a_second_link_only_where_it_helps() -> None:
    blocks = flux_blocks()
    slow = [budget(GPU0, 16 * GIB), budget(GPU1, 24 * GIB, 12e9), budget(CPU, 64 * GIB, 25e9)]
    fast = [budget(GPU0, 16 * GIB), budget(GPU1, 24 * GIB, 12e9), budget(CPU, 64 * GIB, FLUX_LINK)]
    with_both = make_plan(Auto(), blocks, slow, GPU0)
    with_one = make_plan(Auto(), blocks, fast, GPU0)
    assert with_both.bytes_on(GPU1) > 0
    assert with_both.bytes_on(CPU) / with_both.bytes_on(GPU1) == pytest.approx(25 / 12, rel=0.05)
    assert with_one.bytes_on(GPU1) == 0
    alone = make_plan(Auto(), blocks, [slow[0], slow[2]], GPU0)
    assert with_both.forecast is not None and alone.forecast is not None
    assert with_both.forecast.step < alone.forecast.step


def test_auto_spills_over_when_the_fastest_donor_is_small() -> None:
    budgets = [budget(GPU0, 8 * GIB), budget(GPU1, 4 * GIB, 50e9), budget(CPU, 64 * GIB, 10e9)]
    plan = make_plan(Auto(2 * GIB), blocks_of(*[GIB] * 12), budgets, GPU0)
    assert plan.bytes_on(GPU0) == 4 * GIB
    assert 0 < plan.bytes_on(GPU1) <= 4 * GIB
    assert plan.bytes_on(CPU) == 8 * GIB - plan.bytes_on(GPU1)


def test_the_links_of_all_devices_matter_to_auto_when_something_has_to_leave() -> None:
    budgets = [budget(GPU0, 16 * GIB), budget(GPU1, 24 * GIB), budget(CPU, 64 * GIB)]
    assert possible_donors(Auto(), blocks_of(*[GIB] * 20), budgets, GPU0) == {GPU1, CPU}
    assert possible_donors(Auto(), blocks_of(*[GIB] * 12), budgets, GPU0) == frozenset()


@pytest.mark.parametrize(
    ("text", "donors"),
    [
        ("cuda:0,100%", set()),
        ("cuda:0,50%;cpu,50%", {CPU}),
        ("cuda:0,300b;cuda:1,300b;cpu,*", {GPU1}),
        ("cuda:0,300b", {CPU}),
        ("#cuda:0;1;cuda:1", {GPU1}),
        ("#cuda:0;0;cuda:1", set()),
    ],
)
def test_other_requests_say_whose_links_matter(text: str, donors: set[DeviceId]) -> None:
    assert possible_donors(parse_request(text), blocks_of(*[100] * 6), roomy(), GPU0) == donors


def test_asking_for_donors_refuses_what_planning_would() -> None:
    with pytest.raises(UnknownDevice, match="cuda:2 is not present"):
        possible_donors(Auto(), blocks_of(100), roomy(), GPU2)
    with pytest.raises(AllocationError, match="cannot be its own donor"):
        possible_donors(VirtualVram(GIB, (GPU0,)), blocks_of(100), roomy(), GPU0)


def test_auto_refuses_what_no_device_can_hold() -> None:
    with pytest.raises(DoesNotFit, match=r"9.00 GiB have to leave cuda:0, .* \(free: cpu 4.00 GiB\)"):
        make_plan(Auto(3 * GIB), blocks_of(*[GIB] * 20), [budget(GPU0, 16 * GIB), budget(CPU, 4 * GIB)], GPU0)
    with pytest.raises(DoesNotFit, match="there is no other device"):
        make_plan(Auto(3 * GIB), blocks_of(*[GIB] * 20), [budget(GPU0, 16 * GIB)], GPU0)


def test_a_request_that_does_not_fit_is_refused_with_one_that_does() -> None:
    budgets = [budget(GPU0, 8 * GIB), budget(CPU, 64 * GIB)]
    blocks = blocks_of(*[GIB // 4] * 40)
    with pytest.raises(DoesNotFit, match=r"write cuda:0,7.25gb or less"):
        make_plan(parse_request("cuda:0,9gb;cpu,*"), blocks, budgets, GPU0)
    plan = make_plan(parse_request("cuda:0,7.25gb;cpu,*"), blocks, budgets, GPU0)
    assert plan.bytes_on(GPU0) + plan.ring_bytes <= 8 * GIB


def test_staging_memory_counts() -> None:
    """7.5 GiB are free: 7 of a model's 8 GiB would fit, but not beside a ring of 1 GiB. 6.5 GiB do."""
    budgets = [budget(GPU0, 15 * GIB // 2), budget(CPU, 64 * GIB)]
    blocks = blocks_of(*[GIB // 2] * 16)
    with pytest.raises(DoesNotFit, match=r"7.00 GiB of the model .* and 1.00 GiB for staging, but 7.50 GiB are free"):
        make_plan(parse_request("cuda:0,7gb"), blocks, budgets, GPU0, ring_bytes=GIB)
    plan = make_plan(parse_request("cuda:0,6.5gb"), blocks, budgets, GPU0, ring_bytes=GIB)
    assert (plan.bytes_on(GPU0), plan.ring_bytes) == (13 * GIB // 2, GIB)


def test_staging_memory_counts_where_nothing_else_rests() -> None:
    budgets = [budget(GPU0, 99), budget(CPU, 64 * GIB)]
    with pytest.raises(DoesNotFit, match=r"0 B of the model .* and 100 B for staging, but 99 B are free there"):
        make_plan(parse_request("cpu,*"), blocks_of(100, 100), budgets, GPU0, ring_bytes=100)


def test_the_compute_device_is_named_once() -> None:
    blocks = blocks_of(100)
    assert make_plan(parse_request("#cuda:0;0;cpu"), blocks, roomy(), GPU0).compute == GPU0
    with pytest.raises(AllocationError, match="names cuda:0 as compute device, but cuda:1 was chosen"):
        make_plan(parse_request("#cuda:0;0;cpu"), blocks, roomy(), GPU1)


def test_devices_have_one_budget_each_and_all_have_one() -> None:
    with pytest.raises(InputError, match="cpu has two budgets"):
        make_plan(Auto(), blocks_of(100), [*roomy(), *roomy(CPU)], GPU0)
    with pytest.raises(UnknownDevice, match="cuda:2 is not present"):
        make_plan(Auto(), blocks_of(100), roomy(), GPU2)


def test_links_of_the_forecast_come_in_the_order_of_the_request() -> None:
    plan = make_plan(parse_request("cuda:0,50%;cuda:1,20%;cpu,30%"), flux_blocks(), roomy(), GPU0)
    assert plan.forecast is not None
    assert [device for device, _ in plan.forecast.links] == [GPU1, CPU]


def test_computing_on_the_cpu_with_weights_on_an_accelerator() -> None:
    plan = make_plan(parse_request("cpu,50%;cuda:1,50%"), blocks_of(*[MIB] * 4), roomy(), CPU)
    assert plan.bytes_by_home() == {CPU: 2 * MIB, GPU1: 2 * MIB}


def test_ten_thousand_blocks() -> None:
    blocks = [Block(f"b{i}", MIB + i % 7, compute=1e-6 * (i % 13)) for i in range(10_000)]
    plan = make_plan(parse_request("cuda:0,40%;cuda:1,30%;cpu,30%"), blocks, roomy(), GPU0)
    assert plan.total_bytes == total_bytes(blocks)
    assert plan.bytes_on(GPU0) == pytest.approx(0.4 * plan.total_bytes, abs=2 * MIB)


def test_explain_one_line() -> None:
    plan = make_plan(parse_request("cuda:0,50%;cpu,50%"), blocks_of(*[GIB] * 4, seconds=0.1), roomy(), GPU0)
    assert explain.one_line(plan) == (
        "cuda:0 computes and holds 2.00 GiB (50.0 %); cpu holds 2.00 GiB (50.0 %); "
        "step about 0.400 s (an estimate), as fast as with all blocks resident"
    )
    resident = make_plan(VirtualVram(0, (CPU,)), blocks_of(GIB), roomy(), GPU0)
    assert explain.one_line(resident) == "cuda:0 computes and holds 1.00 GiB (100.0 %)"


def test_explain_table() -> None:
    blocks = blocks_of(*[GIB] * 4, seconds=0.01)
    plan = make_plan(parse_request("cuda:0,25%;cuda:1,25%;cpu,50%"), blocks, roomy(), GPU0)
    assert explain.table(plan) == "\n".join(
        (
            "device             blocks     bytes    share  link time",
            "cuda:0 (computes)       1  1.00 GiB   25.0 %          -",
            "cpu                     2  2.00 GiB   50.0 %   85.90 ms",
            "cuda:1                  1  1.00 GiB   25.0 %   89.48 ms",
            "model                   4  4.00 GiB  100.0 %",
            "Predicted step: 0.109 s, 173.7 % slower than with all blocks resident; staging takes 2.00 GiB of cuda:0.",
        )
    )
    resident = make_plan(VirtualVram(0, (CPU,)), [], roomy(), GPU0)
    assert explain.table(resident).splitlines() == [
        "device             blocks  bytes  share  link time",
        "cuda:0 (computes)       0    0 B      -          -",
        "model                   0    0 B      -",
        "Nothing is streamed: a step takes the compute time of the blocks.",
    ]


def test_explain_a_plan_without_a_forecast() -> None:
    plan = make_plan(parse_request("cpu,*"), blocks_of(GIB), roomy(), GPU0)
    bare = type(plan)(plan.compute, plan.placements, plan.ring_bytes)
    assert explain.one_line(bare) == "cuda:0 computes and holds 0 B (0.0 %); cpu holds 1.00 GiB (100.0 %)"
    assert "Predicted" not in explain.table(bare)


@pytest.mark.parametrize("reason", Reason)
def test_explain_one_block(reason: Reason) -> None:
    assert reason in explain.REASON_TEXT
    fixed = None if reason in (Reason.RESIDENT, Reason.STREAMED, Reason.LOW_INTENSITY) else reason
    plan = make_plan(parse_request("cpu,*"), [Block("x.y", GIB, immovable=fixed)], roomy(), GPU0)
    said = explain.block_reason(plan, "x.y")
    assert said.startswith(f"x.y (1.00 GiB) rests on {plan['x.y'].home}: ")
    why = explain.REASON_TEXT[fixed].format(compute=GPU0) if fixed else "copied to cuda:0 just before it runs"
    assert why in said


def test_explain_a_block_that_is_not_there() -> None:
    plan = make_plan(parse_request("cpu,*"), [Block("double.0.qkv", 1)], roomy(), GPU0)
    with pytest.raises(InputError, match=r"no block 'qkv'; did you mean 'double.0.qkv'\?"):
        explain.block_reason(plan, "qkv")
    with pytest.raises(InputError, match="no block 'zzz'$"):
        explain.block_reason(plan, "zzz")


UNTOLD, UNTOLD_TOO = DeviceId("directml", 0), DeviceId("directml", 1)
SILENT = [*(DeviceBudget(device, UNKNOWN, UNKNOWN) for device in (UNTOLD, UNTOLD_TOO)), budget(CPU, 8 * GIB)]
"""Devices that do not tell how much memory they have."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {UNTOLD: 6 * GIB}),
        ("directml:0,4gb;cpu,*", {UNTOLD: 4 * GIB, CPU: 2 * GIB}),
        ("directml:1,50%;cpu,50%", {UNTOLD: 0, UNTOLD_TOO: 3 * GIB, CPU: 3 * GIB}),
        ("#;5;directml:1,cpu", {UNTOLD: GIB, UNTOLD_TOO: 5 * GIB}),
    ],
)
def test_what_is_asked_of_a_device_that_does_not_tell_its_memory_fits(text: str, expected: dict[DeviceId, int]) -> None:
    plan = make_plan(parse_request(text), blocks_of(*[GIB // 4] * 24), SILENT, UNTOLD)
    assert plan.bytes_by_home() == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("auto,3gb", r"3.00 GiB of directml:0 are to stay free, but that device does not tell .*; write auto, or what"),
        ("0.5", r"the memory of directml:0, but that device does not tell .* write a size or percent of the model"),
        ("directml:1,0.5", r"the memory of directml:1, but that device does not tell"),
    ],
)
def test_what_needs_the_size_of_its_memory_is_refused(text: str, problem: str) -> None:
    with pytest.raises(AllocationError, match=problem):
        make_plan(parse_request(text), blocks_of(100, 100), SILENT, UNTOLD)


def test_auto_moves_nothing_to_a_device_that_does_not_tell_its_memory() -> None:
    plan = make_plan(Auto(), blocks_of(*[GIB // 4] * 24), [budget(GPU0, 4 * GIB), *SILENT], GPU0)
    assert plan.bytes_by_home().keys() == {GPU0, CPU}


def test_any_device_type_can_hold_and_compute() -> None:
    xpu = DeviceId("xpu", 0)
    plan = make_plan(parse_request("xpu:0,50%;npu:3,50%"), blocks_of(100, 100), roomy(xpu, DeviceId("npu", 3)), xpu)
    assert plan.bytes_by_home() == {xpu: 100, DeviceId("npu", 3): 100}
