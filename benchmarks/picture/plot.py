"""Bars of seconds by case and side, as an SVG file."""

from __future__ import annotations

import statistics
from html import escape
from typing import Any

from .cases import CASES, SIDES
from .rules import measured

COLOURS = {"ours": "#2a9d8f", "core": "#8d99ae", "static": "#d9b26f", "diffusers": "#b07aa1"}
PANELS = {"first": "loading and four steps, seconds", "second": "another prompt, seconds"}
LEFT, WIDTH, BAR, GAP = 130, 420, 12, 10


def svg(results: dict[str, Any]) -> str:
    """One panel for each of `PANELS`, below each other."""
    at, parts = 20, []
    for figure, title in PANELS.items():
        bars = _bars(results["rows"], figure)
        longest = max((value for _, _, value in bars), default=1.0)
        parts.append(_text(10, at, title, "bold"))
        at, last = at + GAP, ""
        for case, side, value in bars:
            at += BAR + (GAP if case != last else 0)
            parts.append(_text(10, at, case) if case != last else "")
            length = WIDTH * value / longest
            shape = f'x="{LEFT}" y="{at - BAR + 2}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[side]}"'
            parts.append(f"<rect {shape}/>" + _text(LEFT + length + 5, at, f"{side} {value:.2f}"))
            last = case
        at += 4 * GAP
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 90} {at}" font-family="sans-serif"'
    return f'<svg {box} font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def _bars(rows: list[dict[str, Any]], figure: str) -> list[tuple[str, str, float]]:
    found = ((case, side, [row[figure] for row in measured(rows, case, side)]) for case in CASES for side in SIDES)
    several = {case for case in CASES if len({row["side"] for row in rows if row["case"] == case}) > 1}
    return [(case, side, statistics.median(values)) for case, side, values in found if values and case in several]


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}" fill="#222">{escape(text)}</text>'
