"""The browser's console has no error and no warning that it has not without our scripts, whoever writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from devtools.server import Server
from tests.browser.conftest import CHOOSE, TAB, opened
from tests.browser.test_panel import workflow
from tests.browser.test_saved_workflows import DRAWN, LOAD

LIST = re.compile(r"/extensions$")
"""The route that tells the frontend which scripts of packs to load."""

EMPTY_TAB = """() => window.app.extensionManager.registerSidebarTab({
    id: "empty", icon: "pi pi-microchip", title: "MultiGPU", tooltip: "MultiGPU", type: "custom",
    render: place => {
        const content = document.createElement("p");
        content.className = "an-empty-tab";
        content.textContent = "nothing";
        place.replaceChildren(content);
    },
})"""
"""What the frontend itself says when a tab is opened and closed."""


UNREADABLE = """() => {
    const loader = window.LiteGraph.createNode("VAELoader"), place = window.LiteGraph.createNode("MultiGPUPlaceVAE");
    for (const node of [loader, place]) window.app.graph.add(node);
    loader.widgets[0].value = "pixel_space";
    loader.connect(0, place, 0);
}"""
"""A VAE that is in no file, behind a node of ours."""


@contextmanager
def shown(browser: Any, server: Server, *, ours: bool) -> Iterator[tuple[Any, list[str]]]:
    """A new page with a workflow of ours in it, and what its console says; with or without our scripts."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda told: said.append(f"{told.type}: {told.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))

    def without(asked: Any) -> None:
        scripts = asked.fetch().json()
        asked.fulfill(json=[path for path in scripts if "/multigpu/" not in path])

    if not ours:
        page.route(LIST, without)
    opened(page, server)
    page.evaluate(CHOOSE, True)
    page.evaluate(LOAD, workflow(0))
    page.evaluate(UNREADABLE)
    page.wait_for_function(DRAWN, arg=True, timeout=60_000)
    yield page, said
    context.close()


def problems(said: list[str]) -> set[str]:
    """Errors and warnings, without numbers: times and ids differ."""
    return {re.sub(r"\d+", "N", text) for text in said if text.startswith(("error: ", "warning: "))}


def test_our_scripts_add_nothing_to_the_console(browser: Any, server: Server) -> None:
    with shown(browser, server, ours=False) as (page, said):
        assert page.locator(TAB).count() == 0
        page.evaluate(EMPTY_TAB)
        page.locator(TAB).click()
        page.locator(".an-empty-tab").wait_for(timeout=30_000)
        page.locator(TAB).click()
        page.locator(".an-empty-tab").wait_for(state="detached")
        usual = problems(said)
    with shown(browser, server, ours=True) as (page, said):
        page.locator(TAB).click()
        page.locator(".multigpu-device").first.wait_for(timeout=30_000)
        page.locator(".multigpu-split .multigpu-bar").first.wait_for(timeout=30_000)
        page.locator(".multigpu-split .multigpu-note", has_text="pixel_space cannot be read").wait_for(timeout=30_000)
        page.locator(TAB).click()
        page.locator(".multigpu-panel").wait_for(state="detached")
        assert problems(said) <= usual
