"""What the figures say, as text: medians, ratios, and whether each line that must hold does."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .cases import CASES, FIRST_STEPS, SIDES
from .rules import GB, Row, facts, judge, measured, quotient, rounds

FIGURES = {
    "first": (f"loading and {FIRST_STEPS} steps, s", 1.0),
    "load": ("of these, the loader, s", 1.0),
    "place": ("of these, the place node, s", 1.0),
    "prepare": ("of these, until the model is called, s", 1.0),
    "first_step": ("of these, the first step, s", 1.0),
    "second": ("second prompt, s", 1.0),
    "second_first_step": ("of this, the first step, s", 1.0),
    "step": ("s/step", 1.0),
    "again": ("same prompt with another seed, s", 1.0),
    "change": ("another LoRA, 4 steps, s", 1.0),
    "change_8": ("another LoRA, 8 steps, s", 1.0),
    "off": ("LoRA off, s", 1.0),
    "on": ("LoRA on again, 4 steps, s", 1.0),
    "free": ("VRAM left free in the second prompt, GB", GB),
    "free_least": ("VRAM left free, least, GB", GB),
    "peak": ("VRAM used, most, GB", GB),
    "ram_first": ("RAM, most in the first prompt, GB", GB),
    "ram_peak": ("RAM, most, GB", GB),
    "ram": ("RAM at the end, GB", GB),
    "pinned": ("pinned RAM at the end, GB", GB),
    "homed": ("RAM by plan, GB", GB),
    "streamed": ("copied in the first step by plan, GB", GB),
    "hoisted": ("of these, in the first step only, GB", GB),
    "estimate": ("s/step, estimated when placed", 1.0),
    "forecast": ("s/step, forecast after the first prompt", 1.0),
    "simulated": ("s/step, by the simulator then", 1.0),
    "timed": ("s/step, by the GPU's events", 1.0),
    "waited": ("of this, waiting for weights, s", 1.0),
    "second_of_steps": ("second prompt, of its number of steps times s/step", 1.0),
    "limit": ("limit, s/step", 1.0),
    "limit_unhoisted": ("limit without computing ahead, s/step", 1.0),
}
"""Text and unit of each figure of a row, and of what is computed from rows."""
_PROCESS = {"imports": "importing", "warm_up": "warming up", "measured": "measuring", "ended": "ending"}


def markdown(results: dict[str, Any]) -> str:
    rows = _with_limits(results)
    sides = [side for side in SIDES if any(row["side"] == side for row in rows)]
    lines = [
        f"{part['date']} `{part['command']}`{part.get('commit') and ' at ' + part['commit'] or ''}"
        for part in results.get("parts", [])
    ]
    lines += ["", ", ".join(f"{name} {value}" for name, value in results.get("machine", {}).items()), ""]
    lines += _table("case", "figure, median (least to most)", *sides, "ours/core")
    for case in CASES:
        for figure, (text, unit) in FIGURES.items():
            cells = [_cell(rows, case, side, figure, unit) for side in sides]
            if any(cells):
                ratio = quotient(*(_median(rows, case, side, figure) for side in ("ours", "core")))
                lines.append(_line(case, text, *cells, "" if ratio is None else f"{ratio:.3f}"))
    lines += ["", *_verdicts(results)]
    spent = [row["seconds"] for row in rows if "seconds" in row]
    if spent:
        parts = [f"{words} {statistics.median(each[what] for each in spent):.1f}" for what, words in _PROCESS.items()]
        lines.append(f"Seconds of a process: {', '.join(parts)}.")
    lines += [f"\n{row['case']}, {row['side']}, failed:\n```\n{row['error']}\n```" for row in rows if "error" in row]
    return "\n".join(lines)


def _with_limits(results: dict[str, Any]) -> list[Row]:
    """The rows, ours with the limits of a step."""
    known, rows = facts(results), [dict(row) for row in results["rows"]]
    for row in rows:
        row["second_of_steps"] = quotient(row.get("second"), row["steps"] * row["step"] if "step" in row else None)
    for case in CASES:
        for ours, core in rounds(rows, case):
            ours["limit"] = known.limit(ours, core)
            ours["limit_unhoisted"] = known.limit(ours, core, hoisting=False)
    return rows


def _verdicts(results: dict[str, Any]) -> Iterator[str]:
    yield from _table("must hold", "case", "value (least to most)", "at most", "held")
    verdicts, resident = judge(results), facts(results).resident
    for verdict in verdicts:
        value = "not measured"
        if verdict.values:
            value = f"{verdict.value:.3f}"
        if len(verdict.values) > 1:
            value += f" ({min(verdict.values):.3f} to {max(verdict.values):.3f})"
        yield _line(verdict.text, verdict.case, value, f"{verdict.limit:g}", "yes" if verdict.held else "**no**")
    steps = ", ".join(f"{name} {resident[name]:.4f}" for name in resident if CASES[name].resident == name)
    yield from ("", f"T, s: {steps or 'not measured'}.")
    held, missing = sum(verdict.held for verdict in verdicts), sum(not verdict.values for verdict in verdicts)
    yield f"{held} of {len(verdicts)} held, {missing} not measured."
    yield "`tests/gpu/check_disk.py` measures `auto` in a RAM limit of half the model."


def _table(*titles: str) -> Iterator[str]:
    yield _line(*titles)
    yield "|" + "---|" * len(titles)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _values(rows: list[Row], case: str, side: str, figure: str) -> list[float]:
    return [row[figure] for row in measured(rows, case, side) if row.get(figure) is not None]


def _median(rows: list[Row], case: str, side: str, figure: str) -> float | None:
    values = _values(rows, case, side, figure)
    return statistics.median(values) if values else None


def _cell(rows: list[Row], case: str, side: str, figure: str, unit: float) -> str:
    values = [value / unit for value in _values(rows, case, side, figure)]
    if not values:
        return ""
    spread = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3f}{spread}"
