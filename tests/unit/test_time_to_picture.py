"""What benchmarks/time_to_picture.py makes of its figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.picture import plot, report
from benchmarks.picture.cases import CASES, DEFAULT


def row(case: str, side: str, number: int = 0, **figures: Any) -> report.Row:
    pictures = {what: {"sum": 1.0, "sha256": "a"} for what in ("first", "second")}
    usual = {"first": 4.0, "second": 2.0, "steps": 10, "step": 0.2, "free": 5e8, "ram_peak": 2e9, "pictures": pictures}
    return {"case": case, "side": side, "round": number, **usual, **figures}


def results(*rows: report.Row) -> dict[str, Any]:
    return {"machine": {"link": 50e9}, "rows": list(rows)}


def verdict(of: dict[str, Any], text: str) -> report.Verdict:
    (found,) = (each for each in report.judge(of) if text in each.text)
    return found


def test_every_case_has_one_that_draws_the_same_with_all_weights_resident() -> None:
    assert all(CASES[case.resident].whole for case in CASES.values())
    assert CASES["flux-16-fp8"].resident == "flux-fp8" and CASES["wan-16-33"].resident == "wan-33"
    assert CASES["flux-half"].resident == CASES["flux-16-lora"].resident == "flux"


def test_the_cases_of_the_rules_are_measured_by_default() -> None:
    assert {case for rule in report.RULES for case in rule.cases} <= set(DEFAULT)


def test_latents_have_a_time_where_the_model_wants_one() -> None:
    assert CASES["flux"].latent == (1, 16, 128, 128)
    assert CASES["qwen"].latent == (1, 16, 1, 128, 128)
    assert CASES["wan-33"].latent == (1, 16, 9, 60, 104)


@pytest.mark.parametrize(("first", "held"), [(3.0, True), (3.1, False)])
def test_a_ratio_is_held_against_its_limit(first: float, held: bool) -> None:
    found = verdict(results(row("flux-16", "core"), row("flux-16", "ours", first=first)), "loading plus four")
    assert found.values == (first / 4.0,) and found.held is held


def test_rounds_are_compared_with_those_of_the_same_number() -> None:
    of = results(
        row("flux-16", "core", 0, step=0.2), row("flux-16", "ours", 0, step=0.1),
        row("flux-16", "core", 1, step=0.4), row("flux-16", "ours", 1, step=0.4),
        row("flux-16", "core", 2, step=0.4), row("flux-16", "ours", 2, step=0.3),
    )  # fmt: skip
    found = verdict(of, "s/step, of core's")
    assert found.values == pytest.approx((0.5, 1.0, 0.75))
    assert found.value == pytest.approx(0.75) and found.spread == pytest.approx(0.5)


def test_a_step_is_held_against_the_slower_of_computing_and_streaming() -> None:
    resident, ours = row("flux", "core", step=0.2), row("flux-16", "ours", step=0.42, streamed=20e9)
    assert verdict(results(resident, ours), "of max(T").value == pytest.approx(0.42 / (20 / 50))
    assert verdict(results(resident, {**ours, "streamed": 1e9}), "of max(T").value == pytest.approx(0.42 / 0.2)


def test_without_the_resident_step_or_core_nothing_is_said() -> None:
    said = {each.text for each in report.judge(results(row("flux-16", "ours", streamed=1e9)))}
    assert "second prompt, of its steps" in said
    assert not any("core" in text or "max(T" in text for text in said)


def test_a_second_prompt_is_held_against_its_steps() -> None:
    assert verdict(results(row("flux-16", "ours", second=2.1)), "of its steps").value == pytest.approx(1.05)


def test_free_memory_and_ram_are_differences_in_gigabytes() -> None:
    of = results(row("flux-16", "core", free=4e8), row("flux-16", "ours", free=7e8, homed=15e8))
    assert verdict(of, "VRAM left free").value == pytest.approx(0.3)
    assert verdict(of, "anonymous RAM").value == pytest.approx(0.5)


def test_a_forecast_may_be_wrong_on_either_side() -> None:
    for forecast in (0.16, 0.24):
        found = verdict(results(row("flux-16", "ours", forecast=forecast)), "forecast")
        assert found.value == pytest.approx(0.2) and not found.held


def test_pictures_that_differ_are_counted() -> None:
    other = {"first": {"sum": 1.0, "sha256": "a"}, "second": {"sum": 1.0, "sha256": "b"}}
    of = results(row("flux-16", "core"), row("flux-16", "ours", pictures=other))
    assert verdict(of, "pictures that differ").value == 1


def test_with_a_lora_only_the_picture_without_it_is_compared_with_core() -> None:
    pictures = {what: {"sum": 0.0, "sha256": sha} for what, sha in (("first", "a"), ("off", "c"), ("on", "a"))}
    core = row("flux-16-lora", "core", pictures={**pictures, "first": {"sum": 0.0, "sha256": "z"}})
    of = results(core, row("flux-16-lora", "ours", pictures=pictures))
    assert verdict(of, "differ from core's").value == 0
    assert verdict(of, "comes again").value == 0


def test_a_failed_process_counts_for_nothing_and_is_shown() -> None:
    failed = {"case": "flux-16", "side": "core", "round": 0, "error": "out of memory"}
    of = results(failed, row("flux-16", "ours"))
    assert not any("core" in each.text for each in report.judge(of))
    assert "flux-16, core, failed:\n```\nout of memory\n```" in report.markdown(of)


def test_worse_is_what_grew_by_more_than_the_spread() -> None:
    def verdicts(*values: float) -> list[report.Verdict]:
        return [report.Verdict("s/step, of core's", "flux-16", 1.0, values)]

    assert report.worse(verdicts(0.9), verdicts(0.8)) == ["flux-16: s/step, of core's: 0.900, was 0.800"]
    assert report.worse(verdicts(0.82), verdicts(0.8)) == []
    assert report.worse(verdicts(0.9), verdicts(0.7, 0.8, 0.9)) == []
    assert report.worse(verdicts(0.7), verdicts(0.8)) == []
    assert report.worse(verdicts(0.9), []) == []


def test_the_table_has_medians_spread_and_ratio() -> None:
    rows = [
        row("flux-16", side, number, first=1.0 + number * more)
        for side, more in (("core", 2), ("ours", 1))
        for number in (0, 1)
    ]
    text = report.markdown(results(*rows))
    assert "| flux-16 | loading and 4 steps, s | 1.500 (1 to 2) | 2.000 (1 to 3) | 0.750 |" in text
    assert "| loading plus four steps, of core's | flux-16 | 0.833 (0.667 to 1.000) | 0.75 | **no** |" in text


def test_the_plot_is_an_svg_with_a_bar_for_each_side() -> None:
    root = ElementTree.fromstring(
        plot.svg(results(row("flux-16", "core"), row("flux-16", "ours"), row("wan-1", "core")))
    )
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("flux-16") == 2 and "ours 4.00" in words and "core 2.00" in words
    assert "wan-1" not in words, "a case with one side has nothing to compare"


def test_without_results_there_is_an_empty_report() -> None:
    assert "0 of 0 held" in report.markdown(results())
    ElementTree.fromstring(plot.svg(results()))
