"""ComfyUI's real frontend in a real browser. Skipped, by name, where there is no Chromium or no Playwright.

MULTIGPU_TEST_FRONTEND names one row of the table of frontends, for example "0.30.0 newest frontend"; without it, every
test runs for all rows.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import models
from devtools.hosts import FRONTENDS, Frontend
from devtools.places import Places
from devtools.server import Server
from tests.host.driver import Driver, spec_for
from tests.sim import simdev

SERVE = Path(simdev.__file__).parents[1] / "serve.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BY_NAME = {frontend.name: frontend for frontend in FRONTENDS}
ROWS = [BY_NAME[name] for name in filter(None, [os.environ.get("MULTIGPU_TEST_FRONTEND")])] or FRONTENDS

DESIGNS = {"classic": False, "Nodes 2.0": True}
"""The user chooses whether nodes are elements of the page (Nodes 2.0) instead of drawings on a canvas."""
CHOOSE = "elements => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', elements)"


@pytest.fixture(scope="session", params=ROWS, ids=lambda frontend: frontend.name)
def frontend(request: pytest.FixtureRequest) -> Frontend:
    row: Frontend = request.param
    places = Places.here()
    for needed in (places.host_tree(row.host.version), row.files(places), models.folder(places)):
        if not needed.is_dir():
            pytest.fail(f"{needed} is not there; `python dev.py test --only browser` makes it")
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
def server(frontend: Frontend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """ComfyUI on three simulated GPUs. The environment sets one of our settings."""
    try:
        simdev.build("cuda")
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    spec = spec_for(
        frontend.host,
        tmp_path_factory.mktemp("browser"),
        Path(sys.executable),
        frontend=frontend.files(Places.here()),
        runner=(str(SERVE),),
        environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g", "MULTIGPU_LOG": "info"},
        flags=simdev.HOST_FLAGS,
    )
    with Server(spec) as running:
        yield running
        assert Driver(running).our_tracebacks() == []


@pytest.fixture(scope="session", params=DESIGNS)
def design(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def page(browser: Any, server: Server, design: str) -> Iterator[Any]:
    """ComfyUI's frontend, ready to open a workflow, once for each design of nodes. All tests share it."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    opened = context.new_page()
    ours: list[str] = []
    opened.on("console", lambda said: ours.extend(our_message(said)))
    opened.on("pageerror", lambda error: ours.append(str(error)))
    opened.goto(server.client.address, wait_until="domcontentloaded", timeout=120_000)
    opened.wait_for_function("window.app && window.app.graph && window.app.vueAppReady !== false", timeout=120_000)
    opened.wait_for_function("Object.keys(window.LiteGraph.registered_node_types).length > 100", timeout=120_000)
    opened.evaluate(CHOOSE, DESIGNS[design])
    yield opened
    context.close()
    assert ours == [], "errors and warnings of ours in the browser's console"


def our_message(said: Any) -> list[str]:
    """A message in the console, if it is an error or a warning about this pack's code or routes.

    Not that a help page is missing in one language: the frontend looks for that before it takes the one for all.
    """
    text = f"{said.type}: {said.text} {said.location['url']}"
    if said.type not in ("error", "warning") or re.search(r"/docs/\w+/[\w-]+\.md$", text):
        return []
    return [text] if "multigpu" in text.lower() else []
