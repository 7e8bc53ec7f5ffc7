"""ComfyUI's real frontend in a real browser. Skipped, by name, where there is no Chromium or no Playwright."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import models
from devtools.hosts import HOSTS, Host
from devtools.places import Places
from devtools.server import Server
from tests.host.driver import spec_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session", params=HOSTS, ids=lambda host: host.version)
def host(request: pytest.FixtureRequest) -> Host:
    row: Host = request.param
    if not Places.here().host_tree(row.version).is_dir() or not models.folder(Places.here()).is_dir():
        pytest.fail(f"ComfyUI {row.version} or the tiny models are not there; `python dev.py test` makes them")
    return row


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as session:
        running = session.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(spec_for(host, tmp_path_factory.mktemp(f"browser-{host.version}"), Path(sys.executable))) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """ComfyUI's frontend, ready to open a workflow."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    opened = context.new_page()
    opened.goto(server.client.address, wait_until="domcontentloaded", timeout=120_000)
    opened.wait_for_function("window.app && window.app.graph && window.app.vueAppReady !== false", timeout=120_000)
    opened.wait_for_function("Object.keys(window.LiteGraph.registered_node_types).length > 100", timeout=120_000)
    yield opened
    context.close()
