"""The texts of the panel: all languages have the same ones, and the scripts use no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from multigpu.lifecycle.policy import UNLOADED, Standing
from multigpu.plan.types import Reason
from multigpu.remote.cluster import LOST, READY, STARTING
from multigpu.settings import OPTIONS

ROOT = Path(__file__).parents[2]
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.js")}
CALLS = r"\b(?:say|note|section|button|line|label)\(\s*(?:this\.\w+, )?\"(\w+)\""
"""Calls whose text is given by a key."""
ONE_MORE = "not set to eject: until the next prompt is over"
WORDS = r"\"\w+\"|\b\w+:|facts\.\w+"
"""Where else a key may stand: quoted, as a field, as a row of facts."""
FAMILIES = {
    "reason": [*(reason.value for reason in Reason), "ring"],
    "standing": [standing.value + end for standing in Standing for end in ("", "_tip")],
    "memory": [kind + end for kind in ("cached", "others", "free") for end in ("", "_tip")],
    "part": ["unet_", "clip_"],
    "machine": [READY, STARTING, LOST],
    "freed": [
        re.sub(r"\W+", "_", reason)
        for reason in (
            *UNLOADED.values(),
            "set to eject",
            "set to keep",
            "set to keep, in RAM",
            "not set to eject: until the next prompt is over",
        )
    ],
}
"""Keys that are put together from a prefix and a word of the server."""


def texts(language: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "locales" / language / name).read_text(encoding="utf-8"))
    return content


def test_there_are_three_languages() -> None:
    assert LANGUAGES == ["de", "en", "zh"]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["main.json", "settings.json"])
def test_every_language_has_the_same_texts(language: str, name: str) -> None:
    ours, english = flat(texts(language, name)), flat(texts("en", name))
    assert ours.keys() == english.keys()
    for key, text in ours.items():
        assert text.strip() and placeholders(text) == placeholders(english[key]), key


def test_the_scripts_use_texts_that_exist_and_all_of_them() -> None:
    known = {*texts("en", "main.json")["multigpu"]}
    used = {key for script in SCRIPTS.values() for key in re.findall(CALLS, script)}
    used |= {f"{prefix}_{word}" for prefix, words in FAMILIES.items() for word in words}
    assert used - known == set(), "used, but in no language"
    quoted = {word for script in SCRIPTS.values() for word in re.findall(r"\w+", " ".join(re.findall(WORDS, script)))}
    quoted |= {f"{word}_{end}" for word in quoted for end in ("tip", "model")}
    assert known - used - quoted == set(), "in the languages, but used nowhere"


def test_the_dialog_has_the_settings_and_says_of_each_what_it_does() -> None:
    ids = {option.id for option in OPTIONS.values()}
    assert {key.replace("_", ".") for key in texts("en", "settings.json")} == ids
    assert ids == {*re.findall(r"id: \"(MultiGPU\.\w+)\"", SCRIPTS["settings.js"])}
    for language in LANGUAGES:
        main = texts(language, "main.json")["multigpu"]
        for field, option in OPTIONS.items():
            entry = texts(language, "settings.json")[option.id.replace(".", "_")]
            assert entry == {"name": main[field], "tooltip": main[f"{field}_tip"]}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))
