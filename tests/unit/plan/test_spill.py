"""Letting more leave than was planned, when there is less room than the plan counts on."""

from __future__ import annotations

import pytest

from multigpu.plan import CPU, Placement, Plan, Reason
from multigpu.plan.spill import relieved, spilled

from .shapes import GPU0, GPU1, homes


def placed(*sizes: tuple[int, Reason], ring: int = 0) -> Plan:
    """Blocks b0, b1, ... of these sizes, all on cuda:0 unless their reason says that they stream."""
    placements = tuple(
        Placement(f"b{i}", size, CPU if reason is Reason.STREAMED else GPU0, GPU0, reason)
        for i, (size, reason) in enumerate(sizes)
    )
    return Plan(GPU0, placements, ring)


RESIDENT, STREAMED, LOW, TIED = Reason.RESIDENT, Reason.STREAMED, Reason.LOW_INTENSITY, Reason.TIED


def test_nothing_to_spare_changes_nothing() -> None:
    plan = placed((100, RESIDENT), (50, RESIDENT))
    assert spilled(plan, 0) is plan
    on_cpu = Plan(CPU, (Placement("a", 1, CPU, CPU, RESIDENT),))
    assert spilled(on_cpu, 10) is on_cpu


@pytest.mark.parametrize(
    ("excess", "leaving"),
    [
        (1, {"b3"}),
        (60, {"b3"}),
        (61, {"b3", "b1"}),
        (111, {"b3", "b1", "b2"}),
        (151, {"b3", "b1", "b2", "b4"}),
        (9999, {"b3", "b1", "b2", "b4"}),
    ],
)
def test_the_largest_leave_first_and_low_intensity_ones_last(excess: int, leaving: set[str]) -> None:
    """b0 streams already, b5 cannot leave; b1, b2, b3 have 50, 40 and 60 bytes, b4 has 90 but computes little."""
    sizes = (200, STREAMED), (50, RESIDENT), (40, RESIDENT), (60, RESIDENT), (90, LOW), (99, TIED)
    plan = placed(*sizes, ring=200)
    result = spilled(plan, excess)
    moved = {block for block, home in homes(result).items() if home == "cpu"} - {"b0"}
    assert moved == leaving
    assert all(result[block].reason is STREAMED for block in moved)
    assert result.total_bytes == plan.total_bytes
    assert result.ring_bytes == 200


def test_a_plan_that_streamed_nothing_gets_a_ring_and_counts_it() -> None:
    """Two blocks of 100 for the ring, so three have to leave to free 100."""
    result = spilled(placed(*[(100, RESIDENT)] * 6), 100)
    assert result.bytes_on(CPU) == 300
    assert result.ring_bytes == 200


def test_a_ring_grows_with_the_largest_block_that_leaves_and_counts_it() -> None:
    """The block of 100 frees only 40, because the ring grows from 40 to 100; the next frees all of its 90."""
    result = spilled(placed((10, STREAMED), (100, RESIDENT), (90, RESIDENT), (80, RESIDENT), ring=40), 100)
    assert {block for block, home in homes(result).items() if home == "cpu"} == {"b0", "b1", "b2"}
    assert result.ring_bytes == 100


@pytest.mark.parametrize(
    ("excess", "leaving"), [(0, set()), (1, {"b1"}), (60, {"b1"}), (61, {"b1", "b0"}), (999, {"b1", "b0"})]
)
def test_a_donor_is_relieved_of_its_largest_blocks(excess: int, leaving: set[str]) -> None:
    """b0 and b1 rest on the donor with 50 and 60 bytes, b2 in RAM already, b3 on the compute device."""
    given = [("b0", 50, GPU1, STREAMED), ("b1", 60, GPU1, STREAMED), ("b2", 70, CPU, STREAMED)]
    given.append(("b3", 80, GPU0, RESIDENT))
    plan = Plan(GPU0, tuple(Placement(name, size, home, GPU0, reason) for name, size, home, reason in given), 140)
    result = relieved(plan, GPU1, excess)
    assert {block for block, home in homes(result).items() if home == "cpu"} == {"b2", *leaving}
    assert (result.total_bytes, result.ring_bytes) == (260, 140)
    assert relieved(plan, GPU0, excess) is plan, "the compute device is no donor"
