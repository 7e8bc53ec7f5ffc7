"""The lines that must hold, and whether they do."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .cases import CASES

Row = dict[str, Any]
"""The figures of one process, with its `case`, `side` and `round`; or an `error` instead of figures."""

GB = 1e9
NOISE = 0.03
"""Nothing is called worse for less than this, also where one round shows no spread."""
PLAIN = tuple(name for name, case in CASES.items() if case.card and not case.lora and not case.fits)
LORA = tuple(name for name, case in CASES.items() if case.card and case.lora)
HALF = tuple(name for name, case in CASES.items() if case.allocation)
HOISTED = tuple(name for name in HALF if CASES[name].hoist)
FITS = tuple(name for name, case in CASES.items() if case.fits)


@dataclass(frozen=True)
class Facts:
    """What no single process knows: the speed of the link; by case the step with all weights resident (T), what core
    has drawn then, and what ComfyUI without DynamicVRAM has drawn with a LoRA in resident weights."""

    link: float | None
    resident: dict[str, float]
    pictures: dict[str, Any] = field(default_factory=dict)
    baked: dict[str, Any] = field(default_factory=dict)

    def limit(self, ours: Row, core: Row, *, hoisting: bool = True) -> float | None:
        """max(T, bytes / B) for the bytes that do not fit and have to be copied in each step.

        Bytes that would have fitted into what ours leaves free beyond core are not among them. Neither are hoisted
        ones, except without `hoisting`. A model that was not placed fits.
        """
        count = ours.get("streamed", 0) - (ours.get("hoisted", 0) if hoisting else 0)
        if not CASES[ours["case"]].allocation:
            if "free" not in ours or "free" not in core:
                return None
            count -= max(0, ours["free"] - core["free"])
        return self.slower(ours, count)

    def slower(self, row: Row, count: int) -> float | None:
        """max(T, count / B)"""
        resident = self.resident.get(row["case"])
        return None if resident is None or self.link is None else max(resident, count / self.link)


Value = Callable[[Row, Row, Facts], float | None]
"""From the rows of our side and of core in the same round; None if something that it needs is missing. Core's is empty
if it failed."""


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


def _of_its_steps(ours: Row, core: Row, facts: Facts) -> float | None:
    if "step" not in ours or "second_first_step" not in ours:
        return None
    return quotient(ours["second"], ours["second_first_step"] + (ours["steps"] - 1) * ours["step"])


def _again(ours: Row, core: Row, facts: Facts) -> float | None:
    return quotient(ours.get("again"), ours["steps"] * ours["step"] if "step" in ours else None)


def _forecast_error(ours: Row, core: Row, facts: Facts) -> float | None:
    ratio = quotient(ours.get("forecast"), ours.get("step"))
    return None if ratio is None else abs(ratio - 1)


def _different(ours: Row, theirs: dict[str, Any], what: tuple[str, ...]) -> float | None:
    mine = ours.get("pictures", {})
    both = [each for each in what if each in mine and each in theirs]
    return sum(mine[each]["sha256"] != theirs[each]["sha256"] for each in both) if both else None


def _different_from_core(ours: Row, core: Row, facts: Facts) -> float | None:
    """Only those without a LoRA: DynamicVRAM applies LoRAs in another precision."""
    plain = ("off",) if CASES[ours["case"]].lora else ("first", "second", "again")
    return _different(ours, core.get("pictures") or facts.pictures.get(ours["case"], {}), plain)


def _different_from_baked(ours: Row, core: Row, facts: Facts) -> float | None:
    with_lora = ("first", "second", "change", "change_8", "on")
    return _different(ours, facts.baked.get(ours["case"], {}), with_lora)


def _not_restored(ours: Row, core: Row, facts: Facts) -> float | None:
    """The picture of the first LoRA, drawn again after two others and none."""
    drawn = ours.get("pictures", {})
    return float(drawn["on"]["sha256"] != drawn["first"]["sha256"]) if "on" in drawn and "first" in drawn else None


RULES = (
    Rule("loading plus four steps, of core's", 0.75, PLAIN, of_core("first")),
    Rule("second prompt, of its steps", 1.02, PLAIN, _of_its_steps),
    Rule(
        "second prompt's first step, of max(T, bytes copied in it / B)",
        1.2,
        PLAIN,
        lambda ours, core, facts: quotient(
            ours.get("second_first_step"), facts.slower(ours, ours["streamed"]) if "streamed" in ours else None
        ),
    ),
    Rule("same prompt with another seed, of its steps", 1.02, PLAIN, _again),
    Rule("s/step, of core's", 1.0, PLAIN, of_core("step")),
    Rule(
        "s/step, of max(T, bytes that do not fit / B)",
        1.03,
        PLAIN + HALF,
        lambda ours, core, facts: quotient(ours.get("step"), facts.limit(ours, core)),
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
        "VRAM left free in the second prompt beyond core's, GB",
        0.2,
        PLAIN + LORA,
        lambda ours, core, facts: difference(ours.get("free"), core.get("free")),
    ),
    Rule(
        "most RAM in all prompts beyond the bytes homed there, GB",
        1.0,
        PLAIN + LORA + HALF,
        lambda ours, core, facts: difference(ours.get("ram_peak"), ours.get("homed", 0)),
    ),
    Rule("error of the forecast after the first prompt", 0.1, PLAIN + HALF, _forecast_error),
    Rule("pictures that differ from core's", 0, PLAIN + LORA + HALF + FITS, _different_from_core),
    Rule("pictures with a LoRA that differ from those of resident weights", 0, LORA, _different_from_baked),
    Rule("pictures that differ when a LoRA comes again", 0, LORA, _not_restored),
)


@dataclass(frozen=True)
class Verdict:
    """The values of a rule for one case, one for each round; none if what it needs was not measured."""

    text: str
    case: str
    limit: float
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median. Only if there are values."""
        return statistics.median(self.values)

    @property
    def held(self) -> bool:
        return bool(self.values) and self.value <= self.limit

    @property
    def spread(self) -> float:
        return max(self.values) - min(self.values)


def measured(rows: list[Row], case: str, side: str) -> list[Row]:
    return [row for row in rows if (row["case"], row["side"]) == (case, side) and "error" not in row]


def rounds(rows: list[Row], case: str) -> list[tuple[Row, Row]]:
    """Our row and core's in each round that ours has."""
    core = {row["round"]: row for row in measured(rows, case, "core")}
    return [(row, core.get(row["round"], {})) for row in measured(rows, case, "ours")]


def facts(results: dict[str, Any]) -> Facts:
    known = Facts(results.get("machine", {}).get("link"), {})
    for name, case in CASES.items():
        for other, side in case.needs.items():
            found = measured(results["rows"], other, side)
            if found and side == "core":
                known.resident[name] = statistics.median(row["step"] for row in found)
                known.pictures[name] = found[0].get("pictures", {})
            elif found:
                known.baked[name] = found[0].get("pictures", {})
    return known


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Every rule for every case that was asked for or measured. A round counts where it has what the rule needs."""
    known = facts(results)
    asked = {*results.get("cases", ()), *(row["case"] for row in results["rows"])}
    verdicts = []
    for rule in RULES:
        for case in [case for case in rule.cases if case in asked]:
            values = [rule.value(ours, core, known) for ours, core in rounds(results["rows"], case)]
            found = tuple(value for value in values if value is not None)
            verdicts.append(Verdict(rule.text, case, rule.limit, found))
    return verdicts


def worse(now: list[Verdict], before: list[Verdict]) -> list[str]:
    """A sentence for each value that grew by more than it varies between rounds, and for what is not measured now."""
    new = {(verdict.text, verdict.case): verdict for verdict in now if verdict.values}
    old = [verdict for verdict in before if verdict.values]
    lost = {verdict.case: None for verdict in old if not any(verdict.case == case for _, case in new)}
    sentences = [f"{case}: not measured any more" for case in lost]
    for was in (verdict for verdict in old if verdict.case not in lost):
        verdict = new.get((was.text, was.case))
        if verdict is None:
            sentences.append(f"{was.case}: {was.text}: not measured any more, was {was.value:.3f}")
        elif verdict.value > was.value + max(verdict.spread, was.spread, NOISE):
            sentences.append(f"{was.case}: {was.text}: {verdict.value:.3f}, was {was.value:.3f}")
    return sentences
