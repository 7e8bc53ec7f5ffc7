"""What runs next, learnt by watching."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from multigpu.stream.schedule import UsePredictor


def watch(predictor: UsePredictor, uses: list[int]) -> list[bool]:
    return [predictor.used(block) for block in uses]


def ahead(predictor: UsePredictor, count: int) -> list[int | None]:
    start = predictor.next_position
    return [predictor.expected(start + i) for i in range(count)]


def test_a_right_guess_is_expected_from_the_first_use_and_wraps_around() -> None:
    predictor = UsePredictor(range(3))
    assert ahead(predictor, 4) == [0, 1, 2, None]
    assert all(watch(predictor, [0, 1, 2, 0, 1, 2]))
    assert ahead(predictor, 3) == [0, 1, 2]


def test_a_wrong_guess_is_unlearnt_in_one_round() -> None:
    predictor = UsePredictor(range(4))
    watch(predictor, [3, 1, 0, 2])
    assert sum(watch(predictor, [3, 1, 0, 2])) >= 3
    assert all(watch(predictor, [3, 1, 0, 2] * 3))


def test_without_a_guess_nothing_is_expected_until_something_repeats() -> None:
    predictor = UsePredictor()
    assert watch(predictor, [5, 7, 9]) == [False] * 3
    assert ahead(predictor, 1) == [None]
    assert watch(predictor, [5, 7, 9]) == [False, True, True]


def test_a_block_that_runs_twice_is_told_apart_by_what_ran_before() -> None:
    """1 is followed by 2 the first time and by 3 the second time."""
    predictor = UsePredictor()
    watch(predictor, [0, 1, 2, 1, 3] * 2)
    assert all(watch(predictor, [0, 1, 2, 1, 3] * 3))


def test_a_block_left_out_once_does_not_spoil_the_rest() -> None:
    predictor = UsePredictor(range(6))
    watch(predictor, list(range(6)) * 2)
    assert watch(predictor, [0, 1, 4, 5]) == [True, True, False, True]


def test_two_phases_that_alternate_are_both_remembered() -> None:
    encode, decode = [0, 1, 2], [3, 4, 5]
    predictor = UsePredictor()
    watch(predictor, encode + decode + encode + decode)
    assert all(watch(predictor, encode + decode))
    assert watch(predictor, decode) == [False, True, True]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(2, 6))
@example([0] * 5 + [1] * 5, 2)
def test_any_period_is_fully_expected_after_a_few_rounds(period: list[int], rounds: int) -> None:
    predictor = UsePredictor()
    for _ in range(17 + rounds):
        last = watch(predictor, period)
    assert all(last)


@given(st.lists(st.integers(0, 9), max_size=300))
def test_forgetting_keeps_positions_valid(uses: list[int]) -> None:
    """With a tiny memory the predictor still never expects a block that was not used."""
    predictor = UsePredictor(keep=20)
    seen: set[int] = set()
    for block in uses:
        for guess in ahead(predictor, 5):
            assert guess is None or guess in seen
        predictor.used(block)
        seen.add(block)


def test_a_long_run_stays_expected_when_old_history_is_dropped() -> None:
    predictor = UsePredictor(range(7), keep=50)
    assert all(watch(predictor, list(range(7)) * 100))
