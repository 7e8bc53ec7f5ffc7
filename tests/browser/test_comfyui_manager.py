"""ComfyUI's Manager is there for the tests that run with it, and only for them."""

from __future__ import annotations

from typing import Any

import pytest

from devtools.hosts import Frontend
from devtools.places import Places
from devtools.server import Server

ASK = """async () => {
    const answer = await fetch("/v2/manager/version");
    return answer.ok ? await answer.text() : answer.status;
}"""


@pytest.mark.manager
def test_the_manager_that_comfyui_pins_answers_if_it_is_enabled(
    page: Any, server: Server, frontend: Frontend, manager: bool
) -> None:
    tree = Places.here().host_tree(frontend.host.version)
    _, pinned = (tree / "manager_requirements.txt").read_text().strip().split("==")
    assert page.evaluate(ASK) == (f"V{pinned}" if manager else 404)
    assert ("network_mode: offline" in server.log()) is manager
    button = page.get_by_role("button", name="Extensions", exact=True)
    button.wait_for(state="visible" if manager else "detached", timeout=30_000)
