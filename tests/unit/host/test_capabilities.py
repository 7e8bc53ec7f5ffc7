"""Probing compares what is there with what is expected. Here the standard library stands where a host would."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multigpu.cli import doctor
from multigpu.host import capabilities
from multigpu.host.capabilities import Finding, HostCapabilities, probe
from multigpu.host.surface import SURFACE, Feature, Symbol

AS_EXPECTED = [
    Symbol("json", "dumps", Feature.NODES, "a function", ("obj",), ("indent",)),
    Symbol("json", "JSONEncoder.encode", Feature.NODES, "a method", ("o",)),
    Symbol("json", "JSONEncoder", Feature.NODES, "a class", keywords=("skipkeys",)),
    Symbol("math", "pi", Feature.NODES, "not callable, and nothing is asked of it"),
]

DIFFERENT = [
    (Symbol("json", "dumpz", Feature.NODES, ""), "json.dumpz is missing"),
    (Symbol("json.nowhere", "dumps", Feature.NODES, ""), "json.nowhere.dumps is missing"),
    (Symbol("json", "JSONEncoder.encode.deep", Feature.NODES, ""), "json.JSONEncoder.encode.deep is missing"),
    (Symbol("json", "JSONEncoder.encode", Feature.NODES, "", ("o", "more")),
     "json.JSONEncoder.encode has the parameters (o), expected (o, more)"),
    (Symbol("json", "JSONEncoder.encode", Feature.NODES, "", (), ("more",)),
     "json.JSONEncoder.encode has the parameters (o), expected (more=)"),
    (Symbol("math", "pi", Feature.NODES, "", ("x",)), "math.pi cannot be called"),
]  # fmt: skip


Probe = Callable[..., HostCapabilities]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Probes the given symbols."""

    def probe_them(*symbols: Symbol) -> HostCapabilities:
        monkeypatch.setattr(capabilities, "SURFACE", symbols)
        return probe()

    return probe_them


@pytest.mark.parametrize("symbol", AS_EXPECTED, ids=lambda symbol: symbol.name)
def test_a_symbol_as_expected_has_no_problem(probed: Probe, symbol: Symbol) -> None:
    assert probed(symbol).findings == (Finding(symbol),)


@pytest.mark.parametrize(("symbol", "problem"), DIFFERENT)
def test_a_symbol_that_differs_is_named(probed: Probe, symbol: Symbol, problem: str) -> None:
    assert probed(symbol).findings == (Finding(symbol, problem),)


def test_only_the_feature_that_needs_the_symbol_is_off(probed: Probe) -> None:
    missing = Symbol("json", "gone", Feature.LIFECYCLE, "")
    found = probed(*AS_EXPECTED, missing)
    assert found.offers(Feature.NODES) and found.offers(Feature.PLACEMENT)
    assert not found.offers(Feature.LIFECYCLE)
    assert list(found.features_off()) == [("keep and eject", "json.gone is missing")]
    assert found.summary() == "1 of 5 host symbols differ from what is expected"


def test_without_a_host_everything_is_missing_and_nothing_raises() -> None:
    found = probe()
    assert found.version == "unknown"
    assert [name for name, _ in found.features_off()] == [feature.value for feature in Feature]


def test_every_row_says_why() -> None:
    assert [symbol.name for symbol in SURFACE if len(symbol.why) < 10] == []


def test_the_report_lists_what_differs_and_on_request_all() -> None:
    rows = (Finding(AS_EXPECTED[0]), Finding(DIFFERENT[0][0], "json.dumpz is missing"))
    found = HostCapabilities("1.2.3", True, rows)
    short, whole = (doctor.report(found, list_all=everything) for everything in (False, True))
    assert "nodes           off: json.dumpz is missing" in short
    assert "placement       ok" in short and "DynamicVRAM   on" in short
    assert "json.dumps\n" not in short and "json.dumps\n      ok; a function" in whole


def test_doctor_without_a_comfyui_says_what_to_type(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    from multigpu.cli import main

    assert main(["doctor", "--comfyui", str(tmp_path)]) == 2
    assert "give the one with main.py" in capsys.readouterr().err
    assert main(["doctor"]) == 2
    assert "python -m multigpu doctor --comfyui FOLDER" in capsys.readouterr().err
