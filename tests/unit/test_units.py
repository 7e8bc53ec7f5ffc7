"""Bytes as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu.units import UNITS, format_bytes, scale_decimal, write_bytes, write_bytes_below, write_decimal

SIZES = st.integers(0, 2**60)


def read(text: str) -> int:
    number = text.rstrip("bkmgt")
    return scale_decimal(number, UNITS[text[len(number) :]])


@pytest.mark.parametrize(
    ("unit", "size"),
    [("b", 1), ("k", 2**10), ("kb", 2**10), ("kib", 2**10), ("mb", 2**20), ("g", 2**30), ("gib", 2**30), ("tb", 2**40)],
)
def test_each_unit_has_one_meaning(unit: str, size: int) -> None:
    assert UNITS[unit] == size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0b"),
        (1023, "1023b"),
        (1024, "1kb"),
        (1025, "1025b"),
        (2**20 * 3 // 2, "1.5mb"),
        (int(2.5 * 2**30), "2.5gb"),
        (int(2.3 * 2**30), "2.3gb"),
        (2**40, "1tb"),
    ],
)
def test_written_sizes(count: int, text: str) -> None:
    assert write_bytes(count) == text


@given(SIZES)
def test_written_sizes_read_back_exactly(count: int) -> None:
    assert read(write_bytes(count)) == count


@given(SIZES)
def test_a_suggested_size_is_never_larger_and_at_most_one_percent_smaller(count: int) -> None:
    assert count * 0.99 <= read(write_bytes_below(count)) <= count


def test_a_suggested_size_is_short() -> None:
    assert write_bytes_below(12_750_674_330) == "11.87gb"


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**30, "1.00 GiB"), (2**40, "1.00 TiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_decimals_are_exact() -> None:
    assert scale_decimal("2.5", 1024) == 2560
    assert scale_decimal(".1", 2**30) == 107374182
    assert scale_decimal("3.", 10) == 30
    assert write_decimal(2500, 3) == "2.5"
    assert write_decimal(3000, 3) == "3"
