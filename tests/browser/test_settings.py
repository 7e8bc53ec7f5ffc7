"""Our settings in ComfyUI's own settings dialog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devtools.server import Server

SET = "([name, value]) => window.app.extensionManager.setting.set(name, value)"


@pytest.fixture
def dialog(page: Any) -> Iterator[Any]:
    """The dialog, at our section."""
    page.locator(".side-tool-bar-container [aria-label^='Settings']").click()
    opened = page.get_by_role("dialog")
    opened.get_by_text("MultiGPU", exact=True).first.click(timeout=30_000)
    opened.get_by_text("Run workflows that name missing devices").wait_for(timeout=30_000)
    yield opened
    page.keyboard.press("Escape")
    opened.wait_for(state="hidden", timeout=30_000)


def test_the_dialog_has_our_settings_and_says_what_the_environment_sets(dialog: Any, server: Server) -> None:
    assert dialog.get_by_text("RAM limit (percent)").is_visible()
    assert dialog.get_by_text("info, set by the environment variable MULTIGPU_LOG").is_visible()


def test_what_is_set_there_holds_at_once(page: Any, dialog: Any, server: Server) -> None:
    def told() -> dict[str, Any]:
        settings: dict[str, Any] = server.client.get("/multigpu/settings")
        return settings

    assert (told()["fall_back"]["value"], told()["fall_back"]["choices"]) == (False, [False, True])
    changes = (("MultiGPU.FallBack", "fall_back", True, False), ("MultiGPU.RamLimit", "ram_limit", 70, 0))
    for name, field, value, usual in changes:
        with page.expect_response(lambda answer: answer.url.endswith("/multigpu/settings")):
            page.evaluate(SET, [name, value])
        assert told()[field]["value"] == value and told()[field]["source"] == "settings"
        with page.expect_response(lambda answer: answer.url.endswith("/multigpu/settings")):
            page.evaluate(SET, [name, usual])
    assert (told()["fall_back"]["value"], told()["ram_limit"]["value"]) == (False, None)
