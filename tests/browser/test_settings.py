"""Our settings in ComfyUI's own settings dialog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devtools.server import Server

SET = "([name, value]) => window.app.extensionManager.setting.set(name, value)"

READ = "() => window.app.extensionManager.setting.get('MultiGPU.RamLimit')"
WHOLE = f"() => ({READ})() > 0 && Number.isInteger(({READ})())"


def type_into(page: Any, box: Any, text: str) -> None:
    box.click()
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    page.keyboard.press("Tab")


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


def test_a_number_that_is_typed_is_a_whole_one(page: Any, dialog: Any, server: Server) -> None:
    """One frontend takes the point away, another takes the number as it is."""
    box = dialog.get_by_role("spinbutton")
    try:
        with page.expect_response(lambda answer: answer.url.endswith("/multigpu/settings")):
            type_into(page, box, "55.5")
        page.wait_for_function(WHOLE, timeout=30_000)
        told = server.client.get("/multigpu/settings")["ram_limit"]
        assert str(told["value"]) == str(page.evaluate(READ)) == box.input_value()
    finally:
        with page.expect_response(lambda answer: answer.url.endswith("/multigpu/settings")):
            type_into(page, box, "0")


def test_what_the_server_refuses_is_taken_back(page: Any, dialog: Any, server: Server) -> None:
    said = {"error": {"message": "on purpose", "field": None, "column": None}}
    page.route("**/multigpu/settings", lambda asked: asked.fulfill(json=said))
    type_into(page, dialog.get_by_role("spinbutton"), "70")
    page.get_by_text("on purpose").last.wait_for(timeout=30_000)
    page.wait_for_function(f"() => ({READ})() === 0", timeout=30_000)
    page.unroute("**/multigpu/settings")
    assert server.client.get("/multigpu/settings")["ram_limit"]["value"] is None
