"""Settings from environment variables: what they can be, and that no value keeps the pack from loading."""

from __future__ import annotations

import logging
import re

import pytest

from multigpu.errors import RequestError
from multigpu.settings import VARIABLES, Settings
from tests.unit.architecture import ROOT


def test_defaults_without_variables() -> None:
    assert Settings.from_environment({}) == Settings(enabled=True, log_level=logging.INFO)


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_variable_is_no_variable(empty: str) -> None:
    assert Settings.from_environment(dict.fromkeys(VARIABLES, empty)) == Settings()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("0", False), ("Off", False), ("false", False), ("1", True), ("on", True), ("off ", False), ("\toff\r", False)],
)
def test_the_switch(text: str, meaning: bool) -> None:
    """`set MULTIGPU_ENABLED=off && python main.py` on Windows sets it to `off` and a space."""
    assert Settings.from_environment({"MULTIGPU_ENABLED": text}) == Settings(enabled=meaning)


def test_the_log_level() -> None:
    assert Settings.from_environment({"MULTIGPU_LOG": "debug "}).log_level == logging.DEBUG


@pytest.mark.parametrize("text", ["10.0.0.7:6379", "node-b:1", "[fe80::1]:6379"])
def test_the_head_of_a_cluster(text: str) -> None:
    assert Settings.from_environment({"MULTIGPU_RAY": text}) == Settings(ray=text)


def test_the_head_of_a_cluster_in_a_file() -> None:
    assert Settings().with_head(" 10.0.0.7:6379\n") == Settings(ray="10.0.0.7:6379")
    assert Settings().with_head("\n") == Settings()
    assert Settings(ray="here:1").with_head("10.0.0.7:6379") == Settings(ray="here:1"), "the environment comes first"
    (problem,) = Settings().with_head("on").problems
    assert problem == "the file ray_head says 'on', but it can be the head of a Ray cluster, as HOST:PORT: none is used"


def test_no_request_names_a_cluster() -> None:
    with pytest.raises(RequestError, match="there is no setting 'ray'"):
        Settings().changed({"ray": "10.0.0.7:6379"})
    assert Settings().with_stored({"MultiGPU.Ray": "10.0.0.7:6379"}) == Settings()


@pytest.mark.parametrize(("text", "meaning"), [("85", 85), ("85%", 85), (" 100 % ", 100), ("", None)])
def test_the_ram_limit(text: str, meaning: int | None) -> None:
    assert Settings.from_environment({"MULTIGPU_RAM_LIMIT": text}) == Settings(ram_limit=meaning)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("MULTIGPU_ENABLED", "perhaps", "it can be 1, true, on, 0, false, off: on is used"),
        ("MULTIGPU_LOG", "perhaps", "it can be debug, info, warning, error: info is used"),
        ("MULTIGPU_FALL_BACK", "perhaps", "it can be 1, true, on, 0, false, off: off is used"),
        ("MULTIGPU_MEASURE", "perhaps", "it can be 1, true, on, 0, false, off: off is used"),
        *(
            ("MULTIGPU_RAY", text, "it can be the head of a Ray cluster, as HOST:PORT: none is used")
            for text in ("on", "node-b", "node-b:", ":6379", "node-b:0", "node-b:65536", "node-b:x", "a:" + "9" * 5000)
        ),
        *(
            ("MULTIGPU_RAM_LIMIT", text, "it can be a percentage from 1 to 100: 85 (if ComfyUI's cache does not")
            for text in ("0", "101", "-5", "0.85", "most", "\u0668\u0665", "9" * 5000)
        ),
    ],
)
def test_a_value_that_means_nothing_is_named_and_the_default_holds(name: str, text: str, says: str) -> None:
    settings = Settings.from_environment({name: text})
    assert settings == Settings(problems=settings.problems)
    (problem,) = settings.problems
    assert problem.startswith(f"{name} is {text!r}, but {says}")


def test_one_sentence_names_all_bad_ones_and_the_good_ones_hold() -> None:
    given = {"MULTIGPU_LOG": "loud", "MULTIGPU_FALL_BACK": "On", "MULTIGPU_RAM_LIMIT": "most"}
    settings = Settings.from_environment(given)
    assert settings.fall_back
    (problem,) = settings.problems
    assert "MULTIGPU_LOG is 'loud'" in problem and "MULTIGPU_RAM_LIMIT is 'most'" in problem
    assert "FALL_BACK" not in problem and "\n" not in problem


def test_a_mistyped_name_is_named_with_those_that_exist() -> None:
    (problem,) = Settings.from_environment({"MULTIGPU_FALLBACK": "on", "MULTIGPU_": "", "PATH": "/bin"}).problems
    assert problem == f"there is no setting MULTIGPU_ or MULTIGPU_FALLBACK; there are {', '.join(VARIABLES)}"


def test_variables_of_the_development_tools_are_no_typing_errors() -> None:
    """Every variable that the code names; the tests name some that do not exist."""
    folders = ("multigpu", "devtools", "benchmarks", "scripts", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("test_")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    names = {name for text in texts for name in re.findall(r"\bMULTIGPU_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert {"MULTIGPU_HOST", "MULTIGPU_DEV_CACHE", *VARIABLES} <= names
    assert Settings.from_environment(dict.fromkeys(names, "")).problems == ()


# -- ComfyUI's settings dialog ----------------------------------------------------------------------------------------


def test_the_environment_comes_first() -> None:
    settings = Settings.from_environment({"MULTIGPU_LOG": "error"})
    now = settings.with_stored({"MultiGPU.LogLevel": "debug", "MultiGPU.FallBack": True, "Comfy.Other": [1]})
    assert now == Settings(log_level=logging.ERROR, fall_back=True)
    told = now.to_json()
    assert {name: (its["value"], its["source"]) for name, its in told.items()} == {
        "fall_back": (True, "settings"), "ram_limit": (None, "default"), "log_level": ("error", "environment"),
    }  # fmt: skip
    assert now.changed({"log_level": "info"}) == now


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("fall_back", True, True), ("fall_back", "off", False), ("ram_limit", 90, 90), ("ram_limit", "90%", 90),
        ("ram_limit", 0, None), ("ram_limit", None, None), ("ram_limit", "", None),
        ("log_level", "Debug", logging.DEBUG), ("log_level", None, logging.INFO),
    ],
)  # fmt: skip
def test_values_of_the_dialog(name: str, value: object, meaning: object) -> None:
    now = Settings().changed({name: value})
    assert getattr(now, name) == meaning
    assert (name in now.sources) is (value not in (None, "", 0) or value is False)


def test_a_setting_goes_back_to_its_default() -> None:
    now = Settings().changed({"ram_limit": 50, "fall_back": True}).changed({"ram_limit": None})
    assert now == Settings(fall_back=True) and now.to_json()["ram_limit"]["source"] == "default"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ram_limit", 101, "ram_limit is 101; it can be a percentage from 1 to 100, or null for 85"),
        ("ram_limit", True, "ram_limit is True"), ("ram_limit", False, "ram_limit is False"),
        ("ram_limit", 0.5, "ram_limit is 0.5"), ("ram_limit", [50], r"ram_limit is \[50\]"),
        ("fall_back", "x" * 1000, "fall_back is 'x{10,70}'; it can be 1, true, on, 0, false, off"),
        ("log_level", 10, "it can be debug, info, warning, error"), ("log_level", {}, "log_level is {}"),
        ("enabled", False, "there is no setting 'enabled'; there are fall_back, ram_limit, log_level"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(name: str, value: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Settings().changed({name: value})


def test_what_comfyui_has_saved_keeps_nothing_from_loading() -> None:
    now = Settings().with_stored({"MultiGPU.RamLimit": "most", "MultiGPU.LogLevel": "warning"})
    assert (now.ram_limit, now.log_level) == (None, logging.WARNING)
    (problem,) = now.problems
    assert problem.startswith("in ComfyUI's settings, ram_limit is 'most'; it can be")
