"""Blocks that see one token are hoisted where that makes a run faster: they leave first, and are copied once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multigpu.plan import CPU, DISK, Block, Plan, Reason, RingModel, explain, make_plan, parse_request
from multigpu.plan.assignment import Work, assign_links
from multigpu.plan.replan import replanned, unhoisted
from multigpu.plan.search import AHEAD, RUN, WORTH, Donors, best_links, quick_links
from multigpu.plan.spill import spilled
from multigpu.units import GIB, MIB

from .shapes import FLUX_LINK, FLUX_SECONDS, GPU0, GPU1, budget, flux_blocks, total_bytes

BUDGETS = [budget(GPU0, 100 * GIB), budget(CPU, 100 * GIB, FLUX_LINK)]


def flux(once: bool = True) -> list[Block]:
    return [replace(block, once=once and block.name.endswith("mod")) for block in flux_blocks()]


def placed(request: str, blocks: list[Block] | None = None, ring: int = 512 * MIB) -> Plan:
    return make_plan(parse_request(request), blocks or flux(), BUDGETS, GPU0, ring_bytes=ring)


def names(plan: Plan) -> set[str]:
    return {placement.block for placement in plan.hoisted}


def test_with_half_of_a_flux_away_a_step_takes_no_longer_than_with_none() -> None:
    plan, without = placed("cuda:0,50%;cpu,*"), placed("cuda:0,50%;cpu,*", flux(once=False))
    assert plan.forecast is not None and without.forecast is not None
    assert without.forecast.step >= plan.bytes_on(CPU) / FLUX_LINK
    assert plan.forecast.step == pytest.approx(FLUX_SECONDS, rel=1e-6)
    assert names(plan) == {block.name for block in flux() if block.once}, "all of them"
    hoisted = sum(placement.bytes for placement in plan.hoisted)
    assert dict(plan.forecast.links)[CPU] == pytest.approx((plan.bytes_on(CPU) - hoisted) / FLUX_LINK)
    assert plan.bytes_on(CPU) - without.bytes_on(CPU) < max(block.bytes for block in flux())


@pytest.mark.parametrize("request_", ["cuda:0,75%;cpu,*", "cuda:0,100%;cpu,*"])
def test_where_copies_are_hidden_anyway_nothing_is_hoisted(request_: str) -> None:
    plan = placed(request_)
    assert not plan.hoisted
    assert plan.forecast is not None and plan.forecast.step == pytest.approx(FLUX_SECONDS, rel=1e-3)


def test_a_run_is_compared_as_a_whole_and_its_first_step_copies_everything() -> None:
    """One block of 100 bytes a second of copying that computes for a second, and one of `size` that sees one token.

    All leave. Nothing hoisted: 1 s of computing, 100 + size to copy. Hoisted: that in the first step, then 100.
    """
    for size, hoists in ((2, False), (50, True)):
        sizes, seconds = (100, size), (1.0, 0.0)
        work = Work.of(sizes, seconds, (0, 1), once=(1,))
        donors, ring = Donors((sum(sizes),), (10**6,), (100.0,)), RingModel(1000, (100.0,), latency=0.0)
        found = best_links(work, donors, ring)
        assert found.links == [0, 0]
        assert (found.hoisted == {1}) is hoists
        assert found.seconds(work, ring) == pytest.approx(1.0 if hoists else 1.02)
        first = 1 + size / 100 + (RUN - 1) * AHEAD
        assert (first + (RUN - 1) < WORTH * RUN * (1 + size / 100)) is hoists


def test_computing_ahead_takes_time_as_well() -> None:
    """The layer that sees one token takes a third of a second, for each of the four steps in the first one."""
    work = Work.of((100, 30), (0.7, 0.3), (0, 1), once=(1,))
    found = best_links(work, Donors((130,), (10**6,), (100.0,)), RingModel(1000, (100.0,), latency=0.0))
    assert not found.hoisted


def test_only_as_many_as_have_to_leave() -> None:
    work = Work.of([10] * 10, [0.0, 1.0] * 5, range(10), once=range(0, 10, 2))
    donors, ring = Donors((20,), (1000,), (1.0,)), RingModel(1000, (1.0,))
    found = best_links(work, donors, ring)
    assert len(found.hoisted) == 2 and found.hoisted < {0, 2, 4, 6, 8}
    assert found.seconds(work, ring) == 5.0
    assert quick_links(work, donors) == found


def test_of_blocks_that_have_to_stay_none_is_hoisted() -> None:
    work = Work.of([10] * 4, [0.0, 1.0, 0.0, 1.0], (0, 1, 3), once=(0, 2))
    assert work.once == {0}
    assert work.only((1, 3)).once == frozenset()


def test_the_slowest_donors_take_them() -> None:
    work = Work.of([10] * 6, [1.0] * 6, range(6), in_file=range(6))
    hoisted = frozenset((0, 2, 4))

    def links(quotas: tuple[int, ...], free: tuple[int, ...], disk: int | None = None) -> list[int]:
        return assign_links(work, [0, 1, 2, 3, 4, 5], quotas, free, disk, hoisted, (1, 0))

    assert links((30, 30), (100, 100)) == [1, 0, 1, 0, 1, 0]
    assert links((40, 20), (100, 100)) == [1, 0, 1, 0, 0, 0], "as far as their quota goes"
    assert links((30, 30), (100, 20))[:5:2].count(1) == 2, "and the room"
    assert links((30, 30), (100, 100), disk=1) == [1, 0, 1, 0, 1, 0]
    nowhere = replace(work, in_file=frozenset((0,)))
    assert assign_links(nowhere, [0, 2], (10, 10), (50, 50), 1, hoisted, (1, 0)) == [1, -1, 0, -1, -1, -1]


def test_auto_counts_on_it() -> None:
    """A fast donor alone, if what is left to copy can be hidden behind computing."""
    size = total_bytes(flux_blocks())
    budgets = [
        budget(GPU0, size // 2 + 2 * GIB),
        budget(GPU1, 100 * GIB, FLUX_LINK),
        budget(CPU, 100 * GIB, FLUX_LINK / 2),
    ]
    ways = [make_plan(parse_request("auto"), blocks, budgets, GPU0) for blocks in (flux(), flux(once=False))]
    assert ways[0].hoisted and ways[0].forecast is not None
    assert ways[0].forecast.step == pytest.approx(FLUX_SECONDS, rel=1e-3)
    assert [*map(len, (way.bytes_by_home() for way in ways))] == [2, 3]


def test_disk_takes_what_is_copied_rarely() -> None:
    blocks = [replace(block, in_file=True) for block in flux()]
    budgets = [*BUDGETS, budget(DISK, 100 * GIB, 2e9)]
    plan = make_plan(parse_request("cuda:0,50%;cpu,22.7%;disk,*"), blocks, budgets, GPU0)
    assert {placement.home for placement in plan.hoisted} == {DISK}
    assert plan.forecast is not None and plan.forecast.step < 1.1 * FLUX_SECONDS


def test_with_less_room_they_leave_first() -> None:
    plan = placed("cuda:0,100%;cpu,*")
    less = spilled(plan, 2 * GIB)
    assert all(placement.reason is Reason.HOISTED for placement in less.streamed)
    assert sum(placement.bytes for placement in less.streamed) >= 2 * GIB + less.ring_bytes
    assert less.forecast is not None and less.forecast.step == pytest.approx(FLUX_SECONDS)
    much = spilled(plan, 12 * GIB)
    assert {p.reason for p in much.streamed} == {Reason.HOISTED, Reason.STREAMED}
    assert len(much.hoisted) == sum(block.once for block in flux())
    assert all(p.reason is Reason.STREAMED for p in spilled(placed("cuda:0,100%", flux(once=False)), 2 * GIB).streamed)


def test_another_plan_hoists_as_well_and_without_where_that_is_impossible() -> None:
    plan = placed("cuda:0,50%;cpu,*")
    assert replanned(plan).hoisted == plan.hoisted
    assert unhoisted(plan, {"single.0.linear1"}) is plan
    without = unhoisted(plan, names(plan))
    assert not without.hoisted and not any(p.once for p in without.placements)
    assert without.bytes_on(GPU0) <= plan.bytes_on(GPU0)
    assert without.forecast is not None and without.forecast.step < 1.01 * without.bytes_on(CPU) / FLUX_LINK
    some = unhoisted(plan, {"double.0.img_mod"})
    assert "double.0.img_mod" not in names(some) and len(names(some)) == len(names(plan)) - 1


def test_in_words() -> None:
    plan = placed("cuda:0,50%;cpu,*")
    assert "; 6.05 GiB of it are computed ahead instead of copied in each step; step about " in explain.one_line(plan)
    assert explain.table(plan).endswith("; 6.05 GiB are copied only in the first step of a run.")
    why = "rests on cpu: it is computed ahead for all steps of a run, and copied to cuda:0 only in the first of them"
    assert why in explain.block_reason(plan, "double.3.txt_mod")
    assert next(p for p in plan.to_json()["placements"] if p["block"] == "single.1.mod")["reason"] == "hoisted"
