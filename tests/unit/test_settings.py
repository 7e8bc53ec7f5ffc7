"""Settings from environment variables: what they can be, and that no value keeps the pack from loading."""

from __future__ import annotations

import logging
import re

import pytest

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


@pytest.mark.parametrize(("text", "meaning"), [("85", 85), ("85%", 85), (" 100 % ", 100), ("", None)])
def test_the_ram_limit(text: str, meaning: int | None) -> None:
    assert Settings.from_environment({"MULTIGPU_RAM_LIMIT": text}) == Settings(ram_limit=meaning)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("MULTIGPU_ENABLED", "perhaps", "it can be 1, true, on, 0, false, off: on is used"),
        ("MULTIGPU_LOG", "perhaps", "it can be debug, info, warning, error: info is used"),
        ("MULTIGPU_FALL_BACK", "perhaps", "it can be 1, true, on, 0, false, off: off is used"),
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
