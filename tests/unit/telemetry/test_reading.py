"""Samples of what a process has read, as percents of the files."""

from __future__ import annotations

import pytest

from multigpu.telemetry.reading import ALMOST, Reading


@pytest.mark.parametrize(
    ("samples", "percents"),
    [
        ((1000, 1050, 1100, 1150), (0, 25, 50, 75)),
        ((1200, 1300), (ALMOST, ALMOST)),
        ((900, 1000, 1000), (0, 50, 50)),
        ((1100, 400, 450), (50, 50, 75)),
        ((1001, 1003), (0, 1)),
    ],
    ids=["steady", "more than the files", "starts by letting go", "lets go between two files", "rounds down"],
)
def test_percents(samples: tuple[int, ...], percents: tuple[int, ...]) -> None:
    reading = Reading(200, 1000)
    assert tuple(map(reading.percent, samples)) == percents


def test_an_empty_file_is_read_at_once() -> None:
    assert Reading(0, 10).percent(20) == ALMOST
