"""What the figures say: medians, ratios, whether each line that must hold does, and what became worse."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .cases import CASES, FIRST_STEPS

Row = dict[str, Any]
"""The figures of one process, with its `case`, `side` and `round`; or an `error` instead of figures."""

GB = 1e9
NOISE = 0.03
"""Nothing is called worse for less than this, also where one round shows no spread."""
FIGURES = {
    "first": (f"loading and {FIRST_STEPS} steps, s", 1.0),
    "second": ("second prompt, s", 1.0),
    "step": ("s/step", 1.0),
    "change": ("another LoRA, 4 steps, s", 1.0),
    "change_8": ("another LoRA, 8 steps, s", 1.0),
    "off": ("LoRA off, s", 1.0),
    "on": ("LoRA on again, 4 steps, s", 1.0),
    "free": ("VRAM left free, GB", GB),
    "peak": ("VRAM used, GB", GB),
    "ram_peak": ("anonymous RAM, most in the load, GB", GB),
    "ram": ("anonymous RAM at the end, GB", GB),
    "pinned": ("pinned RAM at the end, GB", GB),
    "homed": ("RAM by plan, GB", GB),
    "forecast": ("s/step by plan", 1.0),
}
PLAIN = tuple(name for name, case in CASES.items() if case.card and not case.lora)
LORA = tuple(name for name, case in CASES.items() if case.lora)
HALF = tuple(name for name, case in CASES.items() if case.allocation)
HOISTED = tuple(name for name in HALF if CASES[name].hoist)


@dataclass(frozen=True)
class Facts:
    """What no single process knows: the speed of the link and, by case, the step with all weights resident, and what
    core has drawn then."""

    link: float | None
    resident: dict[str, float]
    pictures: dict[str, Any] = field(default_factory=dict)

    def limit(self, row: Row) -> float | None:
        """max(T, streamed / B). A model that was not placed fits."""
        resident = self.resident.get(row["case"])
        return None if resident is None or self.link is None else max(resident, row.get("streamed", 0) / self.link)


Value = Callable[[Row, Row, Facts], float | None]
"""From the rows of our side and of core in the same round. Core's is empty if it failed."""


@dataclass(frozen=True)
class Rule:
    """A line that must hold: for each of `cases` the value is at most `limit`."""

    text: str
    limit: float
    cases: tuple[str, ...]
    value: Value


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def difference(one: float | None, other: float | None) -> float | None:
    return (one - other) / GB if one is not None and other is not None else None


def of_core(figure: str) -> Value:
    return lambda ours, core, facts: quotient(ours.get(figure), core.get(figure))


def _of_steps(ours: Row, core: Row, facts: Facts) -> float | None:
    return quotient(ours.get("second"), ours["steps"] * ours["step"] if "step" in ours else None)


def _forecast_error(ours: Row, core: Row, facts: Facts) -> float | None:
    ratio = quotient(ours.get("forecast"), ours.get("step"))
    return None if ratio is None else abs(ratio - 1)


def _pictures_that_differ(ours: Row, core: Row, facts: Facts) -> float | None:
    """Only those without a LoRA: DynamicVRAM applies LoRAs in another precision."""
    mine, theirs = ours.get("pictures", {}), core.get("pictures") or facts.pictures.get(ours["case"], {})
    plain = ("off",) if CASES[ours["case"]].lora else ("first", "second")
    both = [what for what in plain if what in mine and what in theirs]
    return sum(mine[what]["sha256"] != theirs[what]["sha256"] for what in both) if both else None


def _restored(ours: Row, core: Row, facts: Facts) -> float | None:
    """The picture of the first LoRA, drawn again after two others and none."""
    drawn = ours.get("pictures", {})
    return float(drawn["on"]["sha256"] != drawn["first"]["sha256"]) if "on" in drawn and "first" in drawn else None


RULES = (
    Rule("loading plus four steps, of core's", 0.75, PLAIN, of_core("first")),
    Rule("second prompt, of its steps", 1.02, PLAIN, _of_steps),
    Rule("s/step, of core's", 1.0, PLAIN, of_core("step")),
    Rule(
        "s/step, of max(T, streamed / B)",
        1.03,
        PLAIN + HALF,
        lambda ours, core, facts: quotient(ours.get("step"), facts.limit(ours)),
    ),
    Rule(
        "half away, layers computed ahead: s/step, of T",
        1.05,
        HOISTED,
        lambda ours, core, facts: quotient(ours.get("step"), facts.resident.get(ours["case"])),
    ),
    Rule("first prompt with a LoRA, of core's", 1.0, LORA, of_core("first")),
    Rule("another LoRA with 8 steps, of core's", 1.0, LORA, of_core("change_8")),
    Rule("another LoRA with 4 steps, of core's", 1.2, LORA, of_core("change")),
    Rule(
        "s/step with a LoRA, of without",
        1.02,
        LORA,
        lambda ours, core, facts: quotient(ours.get("step"), ours.get("step_off")),
    ),
    Rule(
        "VRAM left free beyond core's, GB",
        0.2,
        PLAIN + LORA,
        lambda ours, core, facts: difference(ours.get("free"), core.get("free")),
    ),
    Rule(
        "most anonymous RAM in the load beyond the bytes homed there, GB",
        1.0,
        PLAIN + LORA + HALF,
        lambda ours, core, facts: difference(ours.get("ram_peak"), ours.get("homed", 0)),
    ),
    Rule("error of the forecast", 0.1, PLAIN + HALF, _forecast_error),
    Rule("pictures that differ from core's", 0, PLAIN + LORA + HALF, _pictures_that_differ),
    Rule("pictures that differ when a LoRA comes again", 0, LORA, _restored),
)


@dataclass(frozen=True)
class Verdict:
    """The values of a rule for one case, one for each round."""

    text: str
    case: str
    limit: float
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def held(self) -> bool:
        return self.value <= self.limit

    @property
    def spread(self) -> float:
        return max(self.values) - min(self.values)


def measured(rows: list[Row], case: str, side: str) -> list[Row]:
    return [row for row in rows if (row["case"], row["side"]) == (case, side) and "error" not in row]


def facts(results: dict[str, Any]) -> Facts:
    resident, pictures = {}, {}
    for name, case in CASES.items():
        found = measured(results["rows"], case.resident, "core")
        if found:
            resident[name] = statistics.median(row["step"] for row in found)
            pictures[name] = found[0].get("pictures", {})
    return Facts(results.get("machine", {}).get("link"), resident, pictures)


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Every rule for every case that was measured. A round counts where it has what the rule needs."""
    known, verdicts = facts(results), []
    for rule in RULES:
        for case in rule.cases:
            core = {row["round"]: row for row in measured(results["rows"], case, "core")}
            ours = measured(results["rows"], case, "ours")
            values = [rule.value(row, core.get(row["round"], {}), known) for row in ours]
            if found := tuple(value for value in values if value is not None):
                verdicts.append(Verdict(rule.text, case, rule.limit, found))
    return verdicts


def worse(now: list[Verdict], before: list[Verdict]) -> list[str]:
    """A sentence for each value that grew by more than it varies between rounds."""
    old = {(verdict.text, verdict.case): verdict for verdict in before}
    sentences = []
    for verdict in now:
        was = old.get((verdict.text, verdict.case))
        if was is not None and verdict.value > was.value + max(verdict.spread, was.spread, NOISE):
            sentences.append(f"{verdict.case}: {verdict.text}: {verdict.value:.3f}, was {was.value:.3f}")
    return sentences


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    sides = [side for side in ("ours", "core", "static", "diffusers") if any(row["side"] == side for row in rows)]
    known = facts(results)
    lines = [f"{results.get('date', '')} `{results.get('command', '')}`", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results.get("machine", {}).items()), ""]
    lines += _table("case", "figure, median (least to most)", *sides, "ours/core")
    for case in CASES:
        for figure, (text, unit) in FIGURES.items():
            cells = [_cell(rows, case, side, figure, unit) for side in sides]
            if any(cells):
                ratio = quotient(*(_median(rows, case, side, figure) for side in ("ours", "core")))
                lines.append(_line(case, text, *cells, "" if ratio is None else f"{ratio:.3f}"))
    lines += ["", *_table("must hold", "case", "value (least to most)", "at most", "held")]
    verdicts = judge(results)
    for verdict in verdicts:
        spread = f" ({min(verdict.values):.3f} to {max(verdict.values):.3f})" if len(verdict.values) > 1 else ""
        held = "yes" if verdict.held else "**no**"
        lines.append(_line(verdict.text, verdict.case, f"{verdict.value:.3f}{spread}", f"{verdict.limit:g}", held))
    resident = ", ".join(f"{name} {known.resident[name]:.4f}" for name in known.resident if CASES[name].whole)
    lines += ["", f"T, s: {resident or 'not measured'}."]
    lines += [f"{sum(verdict.held for verdict in verdicts)} of {len(verdicts)} held. `auto` in a RAM limit of half the"]
    lines[-1] += " model is not measured here."
    lines += [f"\n{row['case']}, {row['side']}, failed:\n```\n{row['error']}\n```" for row in rows if "error" in row]
    return "\n".join(lines)


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
