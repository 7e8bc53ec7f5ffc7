from __future__ import annotations

import logging

import pytest

from multigpu.errors import InputError
from multigpu.settings import Settings


def test_defaults_without_variables() -> None:
    assert Settings.from_environment({}) == Settings(enabled=True, log_level=logging.INFO)


def test_an_empty_variable_is_no_variable() -> None:
    assert Settings.from_environment({"MULTIGPU_ENABLED": "", "MULTIGPU_LOG": ""}) == Settings()


@pytest.mark.parametrize(
    ("text", "meaning"), [("0", False), ("Off", False), ("false", False), ("1", True), ("on", True)]
)
def test_the_switch(text: str, meaning: bool) -> None:
    assert Settings.from_environment({"MULTIGPU_ENABLED": text}).enabled is meaning


def test_the_log_level() -> None:
    assert Settings.from_environment({"MULTIGPU_LOG": "debug"}).log_level == logging.DEBUG


@pytest.mark.parametrize("name", ["MULTIGPU_ENABLED", "MULTIGPU_LOG"])
def test_a_value_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 'perhaps'; it can be .*(on|info)"):
        Settings.from_environment({name: "perhaps"})


@pytest.mark.parametrize(("text", "meaning"), [("85", 85), ("85%", 85), (" 100 % ", 100), ("", None)])
def test_the_ram_limit(text: str, meaning: int | None) -> None:
    assert Settings.from_environment({"MULTIGPU_RAM_LIMIT": text}).ram_limit == meaning


@pytest.mark.parametrize("text", ["0", "101", "-5", "0.85", "most", "\u0668\u0665"])
def test_a_ram_limit_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="MULTIGPU_RAM_LIMIT is .*; it can be a percentage from 1 to 100, such as 85"):
        Settings.from_environment({"MULTIGPU_RAM_LIMIT": text})
