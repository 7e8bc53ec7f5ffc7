"""What benchmarks/time_to_picture.py makes of its figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.picture import parts, plot, report, rules
from benchmarks.picture.cases import CASES, DEFAULT


def row(case: str, side: str, number: int = 0, **figures: Any) -> rules.Row:
    pictures = {what: {"sum": 1.0, "sha256": "a"} for what in ("first", "second")}
    seconds = {"first": 4.0, "second": 2.0, "second_first_step": 0.2, "step": 0.2, "again": 2.0, "steps": 10}
    usual = {**seconds, "free": 5e8, "ram_peak": 2e9, "pictures": pictures}
    return {"case": case, "side": side, "round": number, **usual, **figures}


def results(*rows: rules.Row) -> dict[str, Any]:
    return {"machine": {"link": 50e9}, "rows": list(rows)}


def verdict(of: dict[str, Any], text: str) -> rules.Verdict:
    (found,) = (each for each in rules.judge(of) if text in each.text)
    return found


def test_every_case_has_one_that_draws_the_same_with_all_weights_resident() -> None:
    assert all(CASES[case.resident].whole for case in CASES.values())
    assert CASES["flux-16-fp8"].resident == "flux-fp8" and CASES["wan-16-33"].resident == "wan-33"
    assert CASES["flux-half"].resident == CASES["flux-16-lora"].resident == CASES["flux-lora"].resident == "flux"
    assert CASES["flux-16"].needs == {"flux": "core"}
    assert CASES["flux-16-lora"].needs == {"flux": "core", "flux-lora": "static"}


def test_only_cases_without_hoisting_change_the_setting() -> None:
    changed = {name: case.environment for name, case in CASES.items() if case.environment}
    assert changed.keys() == {"flux-half-streamed", *(f"flux-{share}-streamed" for share in (25, 75, 100))}
    assert all(each == {"MULTIGPU_HOIST": "off"} for each in changed.values())


def test_fp8_is_judged_where_bytes_have_to_be_streamed() -> None:
    judged = {rule.text: {case for case in rule.cases if "fp8" in case} for rule in rules.RULES}
    streamed = {"flux-8-fp8", "flux-6-fp8", "flux-8-scaled-fp8"}
    assert judged.pop("pictures that differ from core's") == {*streamed, "flux-16-fp8", "flux-8-scaled-fp8-lora"}
    assert judged["loading plus four steps, of core's"] == judged["s/step, of core's"] == streamed
    assert all("flux-16-fp8" not in cases for cases in judged.values())


def test_the_cases_of_the_rules_are_measured_by_default() -> None:
    assert {case for rule in rules.RULES for case in rule.cases} <= set(DEFAULT)


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


LIMIT = "s/step, of max(T"


def test_a_step_is_held_against_the_slower_of_computing_and_streaming() -> None:
    others, ours = [row("flux", "core", step=0.2), row("flux-16", "core")], row("flux-16", "ours", step=0.42)
    assert verdict(results(*others, {**ours, "streamed": 20e9}), LIMIT).value == pytest.approx(0.42 / (20 / 50))
    assert verdict(results(*others, {**ours, "streamed": 1e9}), LIMIT).value == pytest.approx(0.42 / 0.2)


def test_hoisted_bytes_and_bytes_that_would_have_fitted_are_not_in_the_limit() -> None:
    ours = row("flux-16", "ours", step=0.42, streamed=20e9, hoisted=5e9, free=8e8)
    of = results(row("flux", "core", step=0.1), row("flux-16", "core", free=3e8), ours)
    assert verdict(of, LIMIT).value == pytest.approx(0.42 / (14.5 / 50))
    text = report.markdown(of)
    assert "| flux-16 | limit, s/step | 0.290 |" in text
    assert "| flux-16 | limit without computing ahead, s/step | 0.390 |" in text


def test_a_first_step_is_held_against_all_bytes_that_it_copies() -> None:
    ours = row("flux-16", "ours", second_first_step=0.6, streamed=20e9, hoisted=5e9)
    of = results(row("flux", "core", step=0.2), ours)
    assert verdict(of, "second prompt's first step").value == pytest.approx(0.6 / 0.4)


def test_what_something_is_missing_for_is_not_measured_and_not_held() -> None:
    of = results(row("flux-16", "ours", streamed=1e9, homed=15e8))
    found = {each.text: each for each in rules.judge(of)}
    assert found["second prompt, of its steps"].held
    missing = {text for text, each in found.items() if not each.values}
    assert missing == {text for text in found if "core" in text or "max(T" in text or "forecast" in text}
    assert not any(found[text].held for text in missing)
    assert "| s/step, of core's | flux-16 | not measured | 1 | **no** |" in report.markdown(of)
    assert f"{len(found) - len(missing)} of {len(found)} held, {len(missing)} not measured." in report.markdown(of)


def test_a_case_that_was_asked_for_is_listed_without_any_figure() -> None:
    of = {**results(row("flux-16", "ours")), "cases": ["flux-16", "wan-16-1"]}
    found = [each for each in rules.judge(of) if each.case == "wan-16-1"]
    assert len(found) > 5 and not any(each.values or each.held for each in found)
    assert not any(each.case == "flux-8" for each in rules.judge(of))


def test_a_second_prompt_is_held_against_its_steps_and_so_is_the_next() -> None:
    ours = row("flux-16", "ours", second=2.4, second_first_step=0.6, again=2.1)
    assert verdict(results(ours), "second prompt, of its steps").value == pytest.approx(1.0)
    assert verdict(results(ours), "another seed").value == pytest.approx(1.05)


def test_free_memory_and_ram_are_differences_in_gigabytes() -> None:
    of = results(row("flux-16", "core", free=4e8), row("flux-16", "ours", free=7e8, homed=15e8))
    assert verdict(of, "VRAM left free").value == pytest.approx(0.3)
    assert verdict(of, "most RAM").value == pytest.approx(0.5)


def test_a_forecast_may_be_wrong_on_either_side() -> None:
    for forecast in (0.16, 0.24):
        found = verdict(results(row("flux-16", "ours", forecast=forecast)), "forecast")
        assert found.value == pytest.approx(0.2) and not found.held


def test_pictures_that_differ_are_counted() -> None:
    other = {"first": {"sum": 1.0, "sha256": "a"}, "second": {"sum": 1.0, "sha256": "b"}}
    of = results(row("flux-16", "core"), row("flux-16", "ours", pictures=other))
    assert verdict(of, "pictures that differ").value == 1
    of = results(row("flux-16", "core"), row("flux-16", "ours", pictures={"again": {"sha256": "b"}}))
    assert not verdict(of, "pictures that differ").values


def test_with_a_lora_only_the_picture_without_it_is_compared_with_core() -> None:
    pictures = {what: {"sum": 0.0, "sha256": sha} for what, sha in (("first", "a"), ("off", "c"), ("on", "a"))}
    core = row("flux-16-lora", "core", pictures={**pictures, "first": {"sum": 0.0, "sha256": "z"}})
    of = results(core, row("flux-16-lora", "ours", pictures=pictures))
    assert verdict(of, "differ from core's").value == 0
    assert verdict(of, "comes again").value == 0
    assert not verdict(of, "resident weights").values


def test_pictures_with_a_lora_are_compared_with_those_of_resident_weights() -> None:
    pictures = {what: {"sum": 0.0, "sha256": sha} for what, sha in (("first", "a"), ("change", "b"), ("on", "a"))}
    baked = {**pictures, "change": {"sum": 0.0, "sha256": "z"}}
    static = row("flux-lora", "static", pictures=baked)
    of = results(static, row("flux-16-lora", "ours", pictures=pictures))
    assert verdict(of, "resident weights").value == 1


def test_a_failed_process_counts_for_nothing_and_is_shown() -> None:
    failed = {"case": "flux-16", "side": "core", "round": 0, "error": "out of memory"}
    of = results(failed, row("flux-16", "ours"))
    assert not any(each.values for each in rules.judge(of) if "core" in each.text)
    assert "flux-16, core, failed:\n```\nout of memory\n```" in report.markdown(of)


def test_worse_is_what_grew_by_more_than_the_spread() -> None:
    def verdicts(*values: float) -> list[rules.Verdict]:
        return [rules.Verdict("s/step, of core's", "flux-16", 1.0, values)]

    assert rules.worse(verdicts(0.9), verdicts(0.8)) == ["flux-16: s/step, of core's: 0.900, was 0.800"]
    assert rules.worse(verdicts(0.82), verdicts(0.8)) == []
    assert rules.worse(verdicts(0.9), verdicts(0.7, 0.8, 0.9)) == []
    assert rules.worse(verdicts(0.7), verdicts(0.8)) == []
    assert rules.worse(verdicts(0.9), []) == []


def test_what_was_measured_and_is_no_longer_is_worse() -> None:
    ours = row("flux-16", "ours")
    before = rules.judge(results(row("flux-16", "core"), ours, row("flux-8", "ours")))
    found = rules.worse(rules.judge({**results(ours), "cases": ["flux-8", "flux-16"]}), before)
    assert found[0] == "flux-8: not measured any more"
    assert "flux-16: s/step, of core's: not measured any more, was 1.000" in found
    assert not any("of its steps" in sentence for sentence in found)


def machine(**other: Any) -> dict[str, Any]:
    return {"gpu": "H200", "torch": "2.11", "host": "0.30.0", "link": 50e9, **other}


def part(command: str, **other: Any) -> dict[str, Any]:
    return {"date": "2026-11-18", "command": command, "machine": machine(**other)}


def test_parts_keep_their_commands_and_the_median_of_their_links_counts() -> None:
    several = [part("one", link=48e9), part("two", link=None), part("three", link=52e9), part("four", link=55e9)]
    assert parts.machine_of(several) == machine(link=52e9)
    assert parts.machine_of([]) == {}
    of = {**results(), "parts": several}
    assert parts.parts_of(of) == several
    assert all(f"2026-11-18 `{command}`\n" in report.markdown(of) for command in ("one", "two", "three", "four"))


def test_a_file_of_one_call_is_one_part() -> None:
    assert parts.parts_of({"rows": [], **part("old")}) == [part("old")]


@pytest.mark.parametrize("other", [{"gpu": "A100"}, {"torch": "2.9"}, {"host": None}])
def test_parts_of_another_machine_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SystemExit) as raised:
        parts.machine_of([part("one"), part("two", **other)])
    said = str(raised.value)
    assert "`one`" in said and "`two`" in said and "GPU H200, torch 2.11, ComfyUI 0.30.0" in said
    assert all((value or "unknown") in said for value in other.values())


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
    assert "0 of 0 held, 0 not measured" in report.markdown(results())
    ElementTree.fromstring(plot.svg(results()))
