"""The model file as a home: in allocations, as a donor, and as what `auto` falls back to when RAM is used up.

The model of most tests has ten blocks of 10 bytes. cuda:0 computes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from multigpu.errors import AllocationError, DoesNotFit, UnknownDevice
from multigpu.plan import (
    CPU,
    DISK,
    Auto,
    Block,
    DeviceBudget,
    Placement,
    Plan,
    Reason,
    VirtualVram,
    disk_budget,
    explain,
    format_request,
    make_plan,
    parse_devices,
    parse_request,
    possible_donors,
)
from multigpu.plan.quotas import ram_reserve
from multigpu.plan.spill import off_disk, relieved, spilled
from multigpu.units import GIB

from .shapes import GPU0, GPU1, blocks_of, budget, homes


def in_file(*sizes: int, outside: tuple[int, ...] = ()) -> list[Block]:
    """Blocks that can rest in the file, but for those with the indices in `outside`."""
    return [replace(block, in_file=i not in outside) for i, block in enumerate(blocks_of(*sizes))]


TEN = in_file(*[10] * 10)


def planned(
    text: str, blocks: list[Block] = TEN, gpu: int = 1000, ram: int = 1000, total: int | None = None
) -> dict[str, int]:
    budgets = [budget(GPU0, gpu), budget(CPU, ram, total=total), disk_budget(blocks)]
    plan = make_plan(parse_request(text), blocks, budgets, GPU0, ring_bytes=10)
    assert sum(plan.bytes_by_home().values()) == plan.total_bytes
    return {str(device): count for device, count in plan.bytes_by_home().items()}


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("cuda:0,50%;disk,*", {"cuda:0": 50, "disk": 50}),
        ("cuda:0,20b;cpu,30b;disk,*", {"cuda:0": 20, "cpu": 30, "disk": 50}),
        ("disk,40%;cuda:0,60%", {"cuda:0": 60, "disk": 40}),
        ("disk,30b;cuda:0,30b", {"cuda:0": 30, "disk": 30, "cpu": 40}),
        ("cuda:0,0.05;disk,*", {"cuda:0": 50, "disk": 50}),
        ("disk,*", {"cuda:0": 0, "disk": 100}),
    ],
)
def test_disk_is_a_device_like_others(text: str, held: dict[str, int]) -> None:
    assert planned(text) == held
    assert format_request(parse_request(text)) == text


def test_disk_is_a_donor() -> None:
    assert parse_devices("cpu,disk") == (CPU, DISK)
    budgets = [budget(GPU0, 1000), budget(CPU, 50, total=80), disk_budget(TEN)]
    plan = make_plan(VirtualVram(50, (CPU, DISK)), TEN, budgets, GPU0)
    assert plan.bytes_by_home() == {GPU0: 50, CPU: 20, DISK: 30}, (
        "a block for rounding and the reserve stay free in RAM"
    )
    budgets[1] = budget(CPU, 40, total=80)
    plan = make_plan(VirtualVram(50, (CPU, GPU1)), TEN, [*budgets, budget(GPU1, 100)], GPU0)
    assert plan.bytes_on(CPU) == 30, "without disk among the donors RAM has no reserve"


def test_the_size_of_disk_is_what_can_rest_in_it() -> None:
    assert disk_budget(in_file(10, 20, 30, outside=(1,)), 3e9) == DeviceBudget(DISK, 40, 40, 3e9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cuda:0,0.5;disk,0.5", "no size of its own; write disk,*"),
        ("#disk;4.0;cpu", "disk is named as compute device, but it can only hold weights"),
    ],
)
def test_what_disk_cannot_be(text: str, problem: str) -> None:
    request = parse_request(text)
    budgets = [budget(GPU0, 1000), budget(CPU, 1000), disk_budget(TEN)]
    with pytest.raises(AllocationError, match=problem):
        make_plan(request, TEN, budgets, request.compute or GPU0)
    with pytest.raises(AllocationError, match=problem):
        possible_donors(request, TEN, budgets, request.compute or GPU0)


def test_without_a_file_there_is_no_disk() -> None:
    with pytest.raises(UnknownDevice, match="disk is not present"):
        make_plan(parse_request("cuda:0,50%;disk,*"), TEN, [budget(GPU0, 1000), budget(CPU, 1000)], GPU0)


# -- blocks whose bytes are not in the file as they are used ------------------------------------------------------


def test_what_cannot_rest_in_the_file_goes_to_another_donor() -> None:
    blocks = in_file(*[10] * 10, outside=(1, 3, 5))
    budgets = [budget(GPU0, 1000), budget(CPU, 1000), disk_budget(blocks)]
    plan = make_plan(parse_request("cpu,10b;disk,*"), blocks, budgets, GPU0)
    assert {name: home for name, home in homes(plan).items() if home == "cpu"} == {
        "b1": "cpu",
        "b3": "cpu",
        "b5": "cpu",
    }
    assert plan.bytes_on(DISK) == 70


def test_it_stays_if_disk_is_the_only_donor() -> None:
    blocks = in_file(*[10] * 10, outside=(1, 3))
    budgets = [budget(GPU0, 1000), budget(CPU, 1000), disk_budget(blocks)]
    plan = make_plan(parse_request("disk,*"), blocks, budgets, GPU0)
    assert [plan["b1"].reason, plan["b3"].home] == [Reason.NOT_IN_FILE, GPU0]
    assert plan.bytes_by_home() == {GPU0: 20, DISK: 80}
    assert "not in the model file as they are used" in explain.block_reason(plan, "b1")


# -- auto ---------------------------------------------------------------------------------------------------------


def test_auto_does_not_touch_disk_while_there_is_room() -> None:
    assert planned("auto,0b", gpu=200) == {"cuda:0": 100}
    assert planned("auto,0b", gpu=50) == {"cuda:0": 40, "cpu": 60}


def test_auto_puts_on_disk_what_has_no_room_in_ram() -> None:
    """RAM has 80 bytes, of which a quarter stays free, and one block for rounding: 20 of its 50 free bytes are used."""
    assert planned("auto,0b", gpu=50, ram=50, total=80) == {"cuda:0": 40, "cpu": 20, "disk": 40}
    assert planned("auto,0b", gpu=50, ram=5, total=80) == {"cuda:0": 40, "disk": 60}


def test_auto_uses_other_accelerators_first() -> None:
    budgets = [budget(GPU0, 50), budget(GPU1, 30), budget(CPU, 0, total=80), disk_budget(TEN)]
    plan = make_plan(Auto(0), TEN, budgets, GPU0, ring_bytes=10)
    assert plan.bytes_by_home() == {GPU0: 40, GPU1: 20, DISK: 40}


def test_auto_on_a_machine_with_nothing_but_a_gpu() -> None:
    plan = make_plan(Auto(0), TEN, [budget(GPU0, 50), disk_budget(TEN)], GPU0, ring_bytes=10)
    assert plan.bytes_by_home() == {GPU0: 40, DISK: 60}


def test_auto_without_room_anywhere_says_so() -> None:
    blocks = in_file(*[10] * 10, outside=tuple(range(8)))
    with pytest.raises(DoesNotFit, match="cannot hold them"):
        planned("auto,0b", blocks, gpu=50, ram=5, total=80)


def test_the_reserve_of_ram() -> None:
    assert ram_reserve(2 * GIB) == GIB // 2
    assert ram_reserve(4 * GIB) == ram_reserve(8 * GIB) == GIB
    assert ram_reserve(16 * GIB) == 2 * GIB
    assert ram_reserve(512 * GIB) == 4 * GIB


def test_the_forecast_counts_the_disk() -> None:
    blocks = in_file(*[10] * 10)
    slow, fast = (
        make_plan(parse_request("cuda:0,50%;disk,*"), blocks, [budget(GPU0, 1000), disk_budget(blocks, speed)], GPU0)
        for speed in (1e3, 1e9)
    )
    assert slow.forecast is not None and fast.forecast is not None
    assert slow.forecast.step == pytest.approx(50 / 1e3, rel=0.01) and fast.forecast.step < slow.forecast.step
    assert "disk holds 50 B (50.0 %)" in explain.one_line(slow)
    assert "disk" in explain.table(slow)


def test_a_ram_that_is_too_small_points_to_disk() -> None:
    with pytest.raises(DoesNotFit, match=r"write cpu,30b or less, and give the rest to disk"):
        planned("cuda:0,20b;cpu,*", ram=40)


# -- less room than planned ---------------------------------------------------------------------------------------


def placed(*placed_on: object) -> Plan:
    placements = tuple(
        Placement(f"b{i}", 10, home, GPU0, Reason.RESIDENT if home == GPU0 else Reason.STREAMED)  # type: ignore[arg-type]
        for i, home in enumerate(placed_on)
    )
    return Plan(GPU0, placements, 10)


def test_more_leaves_to_disk_if_the_plan_uses_it() -> None:
    assert homes(spilled(placed(GPU0, GPU0, DISK), 20, ["b0"])) == {"b0": "disk", "b1": "cpu", "b2": "disk"}
    assert homes(spilled(placed(GPU0, GPU0, CPU), 20, ["b0"])) == {"b0": "cpu", "b1": "cpu", "b2": "cpu"}


def test_ram_is_relieved_to_disk() -> None:
    plan = placed(CPU, CPU, CPU, GPU1)
    assert homes(relieved(plan, CPU, 15, ["b1", "b2"])) == {"b0": "cpu", "b1": "disk", "b2": "disk", "b3": "cuda:1"}
    assert relieved(plan, CPU, 15) is plan
    assert homes(relieved(plan, GPU1, 5, ["b3"]))["b3"] == "cpu"


def test_blocks_can_be_taken_off_disk() -> None:
    plan = placed(DISK, DISK, GPU0)
    assert homes(off_disk(plan, ["b0", "b2"])) == {"b0": "cpu", "b1": "disk", "b2": "cuda:0"}
    assert off_disk(plan, ["b2"]) is plan
