"""What docs/migrating.md promises to users of the archived pack is there: functions, and lines of the log."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from multigpu import api
from multigpu.telemetry.frees import Fate, Freed
from multigpu.telemetry.snapshot import DeviceMemory, Snapshot

ROOT = Path(__file__).parents[2]
OPEN = r"\b[XYN]\b|\breason\b|\b\d[\d:.]*( [KMGT]?i?B)?\b|\.\.\.|\b[a-z]+:\d"
"""What stands for something else in a line of the page: X, a number, a size, a device."""


def rows(title: str) -> list[tuple[str, str]]:
    """The table under a heading: what the archived pack has, and what there is here."""
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")[2]
    lines = [line.strip("| ").split(" | ") for line in text.partition("\n## ")[0].splitlines() if line[:1] == "|"]
    return [(old, new) for old, new in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def promised() -> Iterator[str]:
    """The names that other packs are told to import from `comfyui_multigpu`."""
    for old, new in rows("Names"):
        if "the same names in `comfyui_multigpu`" in new:
            yield from quoted(old)[1:]  # after the module
        yield from (name.partition(".")[2] for name in quoted(new) if name.startswith("comfyui_multigpu."))


def logged() -> Iterator[str]:
    """All that our modules log, and lines that several of them put together."""
    for path in (ROOT / "multigpu").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("log."):
                yield from (given.value for given in call.args[:1] if isinstance(given, ast.Constant))
    yield f"free 3: {Freed(0.0, True, (Fate('X', 'set to eject'),), (Fate('Y', 'set to keep'),)).words()}"
    devices = DeviceMemory("cuda:0", 5, 10), DeviceMemory("cpu", 5, 10)
    yield Snapshot("free 3", "post-unload", 0.0, 1, devices).line()
    yield Snapshot("free 3", "post-gc", 0.0, 1, devices).line()


LOGGED = [re.sub("%[sd]", "X", line) for line in logged()]


@pytest.mark.parametrize("name", sorted(promised()))
def test_functions_that_the_page_names_can_be_imported(name: str) -> None:
    assert name in api.__all__


@pytest.mark.parametrize("line", sorted({line for _, new in rows("Log lines") for line in quoted(new)}))
def test_lines_that_the_page_quotes_are_logged(line: str) -> None:
    pattern = "".join(part if number % 2 else re.escape(part) for number, part in enumerate(split(line)))
    assert any(re.search(pattern, text) for text in LOGGED), line


def split(line: str) -> list[str]:
    """Its own words, and between them what stands for anything."""
    return re.sub(OPEN, "\0.+\0", line).split("\0")


NAMES = [
    "_mgpu_unload_distorch_model", "_mgpu_keep_loaded", "mgpu_mm_log", "model_management_mgpu", "device_utils",
    "distorch_2", "GGUF_AVAILABLE", "WANVIDEO_AVAILABLE", "force_full_system_cleanup", "soft_empty_cache_multigpu",
]  # fmt: skip
LINES = [
    "[GC_ANCHOR]", "[UNLOAD_DEBUG]", "[SELECTIVE_COMPLETE]", "[REMAINING_MODEL]", "[DETECT_DEBUG]",
    "Successfully retained",
]  # fmt: skip


@pytest.mark.parametrize(("title", "names"), [("Names", NAMES), ("Log lines", LINES)])
def test_every_name_of_the_archived_pack_is_there(title: str, names: list[str]) -> None:
    """Those that the archived pack's own documents use."""
    old = " ".join(old for old, _ in rows(title))
    assert [name for name in names if name not in old] == []
