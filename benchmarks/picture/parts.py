"""Figures of several calls of the benchmark as those of one."""

from __future__ import annotations

import statistics
from typing import Any

SAME = {"gpu": "GPU", "torch": "torch", "host": "ComfyUI"}
"""What all parts must agree in, and what it is called."""


def parts_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls that these results come from: date, command and machine of each. Older files are of one call."""
    found: list[dict[str, Any]] = results.get("parts") or [
        {name: results.get(name, "") for name in ("date", "command")} | {"machine": results.get("machine", {})}
    ]
    return found


def machine_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all parts agree in, and the median of their links.

    Raises SystemExit if they do not agree.
    """
    if not parts:
        return {}
    first, *others = ({name: part["machine"].get(name) for name in SAME} for part in parts)
    for part, its in zip(parts[1:], others, strict=True):
        if its != first:
            raise SystemExit(
                f"{_call(part)} was measured with {_words(its)}, but {_call(parts[0])} with {_words(first)}; "
                "such figures cannot be compared: leave one of them out of --add"
            )
    links = [link for part in parts if (link := part["machine"].get("link"))]
    return {**first, "link": statistics.median(links) if links else None}


def _call(part: dict[str, Any]) -> str:
    return f"`{part['command']}` of {part['date']}"


def _words(machine: dict[str, Any]) -> str:
    return ", ".join(f"{words} {machine[name] or 'unknown'}" for name, words in SAME.items())
