"""Which streamed blocks stay on the compute device: those without which a step is fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu.plan import CPU, Plan, make_plan, parse_request
from multigpu.plan.assignment import Work, even_blocks
from multigpu.plan.forecast import step_seconds
from multigpu.plan.retain import retained

from .shapes import FLUX_LINK, FLUX_SECONDS, GPU0, blocks_of, budget, flux_blocks

GB = 10**9


def flux_on(size: float) -> Plan:
    """Flux, of which so many GB are resident."""
    budgets = [budget(GPU0, 100 * GB), budget(CPU, 100 * GB, FLUX_LINK)]
    request = parse_request(f"cuda:0,{size * GB / 2**30}gb;cpu,*")
    return make_plan(request, [replace(block, once="mod" in block.name) for block in flux_blocks()], budgets, GPU0)


def streamed(plan: Plan) -> dict[str, int]:
    return {placement.block: placement.bytes for placement in plan.streamed if placement not in plan.hoisted}


def evenly(plan: Plan, sizes: dict[str, int], room: int) -> frozenset[str]:
    columns = [sizes.get(placement.block, 0) for placement in plan.placements]
    work = Work.of(columns, columns, [i for i, size in enumerate(columns) if size])
    left = {plan.placements[i].block for i in even_blocks(work, sum(columns) - room)}
    return frozenset(sizes.keys() - left)


@pytest.mark.parametrize("resident", [4, 5, 7, 10, 14])
@pytest.mark.parametrize("room", [0.5, 0.9, 2])
def test_a_step_is_never_slower_than_with_blocks_taken_evenly(resident: float, room: float) -> None:
    plan = flux_on(resident)
    sizes, count = streamed(plan), int(room * GB)
    assert plan.timing is not None
    stays = retained(plan, sizes, count)
    assert sum(sizes[block] for block in stays) <= count
    assert step_seconds(plan, plan.timing, stays) <= step_seconds(plan, plan.timing, evenly(plan, sizes, count))


def test_it_matters_where_computing_and_copying_take_about_as_long() -> None:
    plan = flux_on(4.75)
    sizes, count = streamed(plan), int(1.5 * GB)
    assert plan.timing is not None and plan.hoisted
    copying = (sum(sizes.values()) - count) / FLUX_LINK
    assert step_seconds(plan, plan.timing, retained(plan, sizes, count)) < 1.01 * max(copying, FLUX_SECONDS)
    assert step_seconds(plan, plan.timing, evenly(plan, sizes, count)) > 1.03 * max(copying, FLUX_SECONDS)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(0, 2000), st.booleans())
def test_what_stays_fits_and_nothing_else_would(sizes: list[int], room: int, timed: bool) -> None:
    plan = make_plan(parse_request("cuda:0,0b;cpu,*"), blocks_of(*sizes), [budget(GPU0, GB), budget(CPU, GB)], GPU0)
    plan = plan if timed else replace(plan, timing=None)
    needs = {placement.block: placement.bytes for placement in plan.streamed}
    stays = retained(plan, needs, room)
    taken = sum(needs[block] for block in stays)
    assert taken <= room and all(taken + size > room for block, size in needs.items() if block not in stays)
