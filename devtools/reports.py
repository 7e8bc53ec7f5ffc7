"""The result of a part of the suite: counts, failures by name, skips by reason."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """One row of the summary."""

    name: str
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def counts(self) -> str:
        return counts([self])


def counts(reports: Iterable[Report]) -> str:
    """`N passed, N failed, N skipped` over several reports."""
    listed = list(reports)
    passed = sum(report.passed for report in listed)
    failed = sum(len(report.failures) for report in listed)
    skipped = sum(report.skips.total() for report in listed)
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def read_junit(name: str, path: Path) -> Report:
    """The report in a JUnit file as pytest writes it."""
    report = Report(name)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        title = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            report.failures.append(title)
        elif skipped is not None:
            report.skips[skipped.get("message") or "no reason given"] += 1
        else:
            report.passed += 1
    return report
