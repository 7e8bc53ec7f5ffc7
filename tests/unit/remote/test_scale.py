"""Predictions computed by hand."""

from __future__ import annotations

import pytest

from multigpu.remote.scale import (
    GIGABIT,
    MODELS,
    Road,
    Sizes,
    fan_out_seconds,
    fan_out_speed_up,
    latent_bytes,
    prompt_overhead,
    step_overhead,
)

ROAD = Road(0.002, 100e6)


def test_a_call_costs_its_own_time_and_that_of_its_bytes() -> None:
    assert ROAD.seconds(0, 0) == 0.002
    assert ROAD.seconds(4_000_000, 6_000_000) == pytest.approx(0.102)
    assert Road(0.001).seconds(10**9, 10**9) == 0.001


def test_roads_in_a_row_take_the_time_of_both() -> None:
    both = ROAD.then(Road(0.001, 25e6))
    assert both.call == pytest.approx(0.003) and both.speed == pytest.approx(20e6)
    assert ROAD.then(Road(0.0)) == ROAD and Road(0.0).then(Road(0.0)).speed is None


def test_a_step_sends_the_latent_there_and_back_and_the_conditioning_once() -> None:
    sizes = Sizes(1_000_000, 8_000_000, rows=2)
    assert step_overhead(sizes, ROAD) == pytest.approx(0.002 + 0.04)
    assert prompt_overhead(sizes, ROAD, 10) == pytest.approx(0.42 + 0.08 + 2 * 0.002), "a call for each text"


def test_sizes_of_known_models() -> None:
    assert latent_bytes(16, 1024, 1024) == 16 * 128 * 128 * 4
    assert MODELS["Flux 1024 x 1024"] == Sizes(524_288, 4_194_304 + 3072 + 2 * 1_048_576)
    assert MODELS["Wan 2.1 1280 x 720 x 81, cfg"].latent == 16 * 160 * 90 * 21 * 2
    assert GIGABIT == 125e6


def test_workers_compute_at_the_same_time() -> None:
    assert fan_out_seconds(8, 4, 10.0, 1_000_000, ROAD) == pytest.approx(20.024)
    assert fan_out_seconds(9, 4, 10.0, 1_000_000, ROAD) == pytest.approx(30.036), "the last picture takes a round"
    assert fan_out_seconds(3, 8, 10.0, 0, Road(0.0)) == 10.0


def test_what_comes_back_shares_one_road() -> None:
    """64 pictures of 100 MB at 100 MB/s take 64 s, however many workers there are."""
    assert fan_out_seconds(64, 64, 1.0, 100_000_000, Road(0.0, 100e6)) == pytest.approx(65.0)
    assert fan_out_speed_up(64, 64, 1.0, 100_000_000, Road(0.0, 100e6)) == pytest.approx(64 / 65)


def test_without_a_cost_n_workers_are_n_times_as_fast() -> None:
    assert [fan_out_speed_up(64, n, 2.0, 1, Road(0.0)) for n in (1, 2, 16, 64)] == [1, 2, 16, 64]
