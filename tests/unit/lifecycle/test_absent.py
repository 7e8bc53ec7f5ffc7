"""Our functions on a host that lacks what keep and eject need."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from multigpu import api
from multigpu.errors import HostIncompatible
from multigpu.lifecycle.absent import NoFreeFlow


@pytest.fixture(autouse=True)
def without_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = NoFreeFlow(HostIncompatible("comfy.model_management.free_memory is missing"))
    monkeypatch.setattr(api, "current", lambda: SimpleNamespace(free_flow=flow))


def test_what_nodes_of_other_packs_do_beside_their_work_has_no_effect() -> None:
    api.set_keep_loaded(object(), "keep")
    loads = iter("ab")
    assert [api.load_once("node", {}, lambda: [next(loads)]) for _ in range(2)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    "call",
    [
        api.force_full_system_cleanup,
        api.soft_empty_cache_multigpu,
        api.clear_all_retention_anchors,
        lambda: api.add_retention_anchor(object()),
    ],
)
def test_what_is_asked_for_says_why_it_cannot_be_done(call: Callable[[], object]) -> None:
    with pytest.raises(HostIncompatible, match="free_memory is missing"):
        call()
