"""ComfyUI's real frontend in a real browser. Skipped, by name, where there is no Chromium or no Playwright.

MULTIGPU_TEST_FRONTEND names one row of the table of frontends, for example "0.30.0 newest frontend"; without it, every
test runs for all rows. Tests that are marked `manager` run a second time with ComfyUI's Manager enabled.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devtools import models, side_packages
from devtools.hosts import FRONTENDS, NEWEST, Frontend
from devtools.places import Places
from devtools.server import Server, ServerSpec
from tests.host.driver import PACK, Driver, spec_for
from tests.sim import simdev

SERVE = Path(simdev.__file__).parents[1] / "serve.py"
OTHER_PACK = Places.here().root / "tests" / "packs" / "quantised_pack"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BY_NAME = {frontend.name: frontend for frontend in FRONTENDS}
ROWS = [BY_NAME[name] for name in filter(None, [os.environ.get("MULTIGPU_TEST_FRONTEND")])] or FRONTENDS

TAB = ".side-tool-bar-container [aria-label^='MultiGPU']"
"""The button of the panel's tab."""
DESIGNS = {"classic": False, "Nodes 2.0": True}
"""The user chooses whether nodes are elements of the page (Nodes 2.0) instead of drawings on a canvas."""
CHOOSE = "elements => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', elements)"

MANAGER_SETTINGS = "[default]\nnetwork_mode = offline\nuse_uv = false\n"
NOTHING_INSTALLED = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_NO_CACHE": "1"}
"""When the Manager starts, it lists the packages of the Python that runs it, and installs what it misses among them: by
pip, or by uv if pip is slow to answer."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "manager: with ComfyUI's Manager enabled, too")
    config.addinivalue_line("markers", "once: starts a server of its own: runs with one frontend only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("once") and _row(item) != Frontend(NEWEST)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _row(item: pytest.Item) -> Frontend:
    row: Frontend = item.callspec.params["frontend"]  # type: ignore[attr-defined]
    return row


@pytest.hookimpl(tryfirst=True)  # so that pytest puts all tests of one server together
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "manager" in metafunc.fixturenames:
        choices = [False, True] if metafunc.definition.get_closest_marker("manager") else [False]
        ids = [pytest.HIDDEN_PARAM, "Manager"][: len(choices)]
        metafunc.parametrize("manager", choices, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session", params=ROWS, ids=lambda frontend: frontend.name)
def frontend(request: pytest.FixtureRequest) -> Frontend:
    row: Frontend = request.param
    places = Places.here()
    tree, manager = places.host_tree(row.host.version), side_packages.manager_folder(row.host, places)
    for needed in (tree, row.files(places), models.folder(places), manager):
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
def manager(request: pytest.FixtureRequest) -> bool:
    """Whether ComfyUI's Manager is enabled."""
    return bool(request.param)


@pytest.fixture(scope="session")
def server(frontend: Frontend, manager: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """ComfyUI on three simulated GPUs, with a pack whose loaders are called as those of ComfyUI-GGUF. The environment
    sets one of our settings.
    """
    try:
        simdev.build("cuda")
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    spec = spec_for(
        frontend.host,
        tmp_path_factory.mktemp("browser"),
        Path(sys.executable),
        frontend=frontend.files(Places.here()),
        packs={PACK: Places.here().root, "gguf": OTHER_PACK, "gguf_v3": OTHER_PACK / "v3"},
        runner=(str(SERVE),),
        environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g", "SIMDEV_LINKS": "25e9", "MULTIGPU_LOG": "info"},
        flags=simdev.HOST_FLAGS,
    )
    installed = installed_packages()
    with Server(enable_manager(spec, frontend) if manager else spec) as running:
        yield running
        assert Driver(running).our_tracebacks() == []
    assert installed_packages() == installed, "the Manager has changed the environment of the tests"


def enable_manager(spec: ServerSpec, frontend: Frontend) -> ServerSpec:
    """The same server with ComfyUI's Manager, which can neither install packages nor use a network.

    The frontend is in the path of Python as well: the Manager installs it if it does not see it among the packages.
    """
    places = Places.here()
    (settings := spec.base / "user" / "__manager" / "config.ini").parent.mkdir(parents=True)
    settings.write_text(MANAGER_SETTINGS)
    packages = [side_packages.manager_folder(frontend.host, places), frontend.files(places).parents[1]]
    added = {
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "COMFYUI_PATH": str(spec.tree),
        "GIT_PYTHON_REFRESH": "quiet",  # there may be no git
        **NOTHING_INSTALLED,
    }
    return replace(spec, flags=(*spec.flags, "--enable-manager"), environment={**spec.environment, **added})


def installed_packages() -> set[str]:
    """The packages of the Python that runs the tests and ComfyUI, with their versions."""
    return {folder.name for folder in Path(sysconfig.get_path("purelib")).glob("*.dist-info")}


@pytest.fixture(scope="session", params=DESIGNS)
def design(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def page(browser: Any, server: Server, design: str) -> Iterator[Any]:
    """ComfyUI's frontend, ready to open a workflow, once for each design of nodes. All tests share it."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    ours: list[str] = []
    page.on("console", lambda said: ours.extend(our_message(said)))
    page.on("pageerror", lambda error: ours.append(str(error)))
    opened(page, server)
    page.evaluate(CHOOSE, DESIGNS[design])
    yield page
    context.close()
    assert ours == [], "errors and warnings of ours in the browser's console"


def opened(page: Any, server: Server) -> None:
    """Open the frontend in a page, and wait until a workflow can be loaded."""
    page.goto(server.client.address, wait_until="domcontentloaded", timeout=120_000)
    page.wait_for_function("window.app && window.app.graph && window.app.vueAppReady !== false", timeout=120_000)
    page.wait_for_function("Object.keys(window.LiteGraph.registered_node_types).length > 100", timeout=120_000)


def our_message(said: Any) -> list[str]:
    """A message in the console, if it is an error or a warning about this pack's code or routes.

    Not that a help page is missing in one language: the frontend looks for that before it takes the one for all.
    """
    text = f"{said.type}: {said.text} {said.location['url']}"
    if said.type not in ("error", "warning") or re.search(r"/docs/\w+/[\w-]+\.md$", text):
        return []
    return [text] if "multigpu" in text.lower() else []
