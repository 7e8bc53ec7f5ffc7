"""A plan in words: one line, a table, or the reason for one block. As data it is `Plan.to_json`."""

from __future__ import annotations

from ..errors import InputError
from ..units import format_bytes
from .types import DeviceId, Forecast, Plan, Reason

REASON_TEXT = {
    Reason.RESIDENT: "it stays where it computes, because there is room for it",
    Reason.LOW_INTENSITY: "it stays where it computes, because it computes too briefly to hide the copy of its bytes",
    Reason.STREAMED: "it is copied to {compute} just before it runs, while blocks before it compute",
    Reason.HOISTED: "it is computed ahead for all steps of a run, and copied to {compute} only in the first of them",
    Reason.TINY: "it stays where it computes, because a copy this small costs more than it frees",
    Reason.TIED: "it stays where it computes, because its weights are shared with another block",
    Reason.EMBEDDING: "it stays where it computes, because it is an embedding table: looked up, not multiplied",
    Reason.NOT_CASTABLE: "it stays where it computes, because ComfyUI cannot run it with its weights elsewhere",
    Reason.NOT_IN_FILE: "it stays where it computes, because its weights are not in the model file as they are used",
}
"""One sentence for each reason; `{compute}` is the compute device."""


def one_line(plan: Plan) -> str:
    """What went where, and the step time expected, for a log."""
    homes = plan.bytes_by_home()
    resident = homes.pop(plan.compute)
    parts = [f"{plan.compute} computes and holds {format_bytes(resident)} ({share(plan, resident)})"]
    parts += [f"{device} holds {format_bytes(count)} ({share(plan, count)})" for device, count in homes.items()]
    if plan.hoisted:
        parts.append(computed_ahead(sum(placement.bytes for placement in plan.hoisted)))
    if plan.forecast is not None and plan.streamed:
        parts.append(f"{step(plan.forecast)}, {_slower(plan.forecast.slowdown)}")
    return "; ".join(parts)


def computed_ahead(count: int) -> str:
    """What hoisting spares, in bytes."""
    return f"{format_bytes(count)} of it are computed ahead instead of copied in each step"


def step(forecast: Forecast) -> str:
    """The time of a step, and whether it is only an estimate: `step 0.208 s`, `step about 0.208 s (an estimate)`."""
    if forecast.measured:
        return f"step {seconds(forecast.step)}"
    return f"step about {seconds(forecast.step)} (an estimate)"


def table(plan: Plan) -> str:
    """An aligned table: device, blocks, bytes, share of the model, seconds of copying per step; then the forecast."""
    counts: dict[DeviceId, int] = {}
    for placement in plan.placements:
        counts[placement.home] = counts.get(placement.home, 0) + 1
    links = dict(plan.forecast.links) if plan.forecast else {}
    rows = [("device", "blocks", "bytes", "share", "link time")]
    for device, count in plan.bytes_by_home().items():
        role = f"{device} (computes)" if device == plan.compute else str(device)
        link = seconds(links[device]) if device in links else "-"
        rows.append((role, str(counts.get(device, 0)), format_bytes(count), share(plan, count), link))
    rows.append(("model", str(len(plan.placements)), format_bytes(plan.total_bytes), share(plan, plan.total_bytes), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    if plan.forecast is not None:
        lines.append(_forecast_line(plan))
    return "\n".join(lines)


def block_reason(plan: Plan, block: str) -> str:
    """Why the block rests where it does, in one sentence. Raises `InputError` for a block that is not in the plan."""
    if block not in plan:
        near = next((p.block for p in plan.placements if block in p.block), None)
        hint = f"; did you mean {near!r}?" if near else ""
        raise InputError(f"the plan has no block {block!r}{hint}")
    placement = plan[block]
    why = REASON_TEXT[placement.reason].format(compute=plan.compute)
    return f"{block} ({format_bytes(placement.bytes)}) rests on {placement.home}: {why}"


def share(plan: Plan, count: int) -> str:
    """`count` as a share of the model's bytes."""
    return f"{100 * count / plan.total_bytes:.1f} %" if plan.total_bytes else "-"


def _forecast_line(plan: Plan) -> str:
    assert plan.forecast is not None
    if not plan.streamed:
        return "Nothing is streamed: a step takes the compute time of the blocks."
    known = "Measured" if plan.forecast.measured else "Predicted"
    takes = f"{seconds(plan.forecast.step)}, {_slower(plan.forecast.slowdown)}"
    hoisted = sum(placement.bytes for placement in plan.hoisted)
    ahead = f"; {format_bytes(hoisted)} are copied only in the first step of a run" if hoisted else ""
    return f"{known} step: {takes}; staging takes {format_bytes(plan.ring_bytes)} of {plan.compute}{ahead}."


def _slower(slowdown: float) -> str:
    percent = round(100 * (slowdown - 1), 1)
    return f"{percent} % slower than with all blocks resident" if percent > 0 else "as fast as with all blocks resident"


def seconds(count: float) -> str:
    """`0.208 s`, `35.21 ms`."""
    return f"{count:.3f} s" if count >= 0.1 else f"{count * 1e3:.2f} ms"
