"""Runs the state machine of `lifecycle_machine.py` with each of ComfyUI's caches; see `tests/machines.py`."""

from __future__ import annotations

import pytest

from tests.host.conftest import StartHost
from tests.host.lifecycle import PACKS, Keeper, own_models
from tests.host.lifecycle_machine import CACHES, LifecycleMachine
from tests.machines import explore


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "cache", [pytest.param(name, marks=[] if name == "usual" else pytest.mark.newest) for name in CACHES]
)
def test_any_order(start_host: StartHost, tmp_path_factory: pytest.TempPathFactory, cache: str) -> None:
    folder = own_models(tmp_path_factory.mktemp("models"))
    own = Keeper(start_host(packs=PACKS, models=folder, flags=("--cpu", *CACHES[cache])).server)
    for case in (_model_is_held_until_its_node_runs, _second_free_unloads_what_the_first_one_left, _old_file_stays_old):
        case(LifecycleMachine(own, cache))
    explore(lambda: LifecycleMachine(own, cache), few=4, steps=15)


def _model_is_held_until_its_node_runs(state: LifecycleMachine) -> None:
    """Found by the machine: the host forgot a model before the loader ran whose choice alone had changed."""
    ours, placed, unknown, plain = (f"{kind}.safetensors" for kind in ("ours", "placed", "unknown", "plain"))
    state.begin()
    state.run(source="workflow x", words={ours: "default", unknown: "keep", plain: "default"})
    state.run(source="client a", words={placed: "eject", ours: "eject", unknown: "default"})


def _second_free_unloads_what_the_first_one_left(state: LifecycleMachine) -> None:
    """Found by the machine: while another model was kept, it stayed in memory until the next prompt was over."""
    ours, placed, unknown = (f"{kind}.safetensors" for kind in ("ours", "placed", "unknown"))
    state.begin()
    state.run(source="client a", words={unknown: "default", ours: "eject", placed: "keep"})
    state.free(cache=False, unload=True)
    state.free(cache=True, unload=True)


def _old_file_stays_old(state: LifecycleMachine) -> None:
    """Found by the machine: a place node that ran after its file had changed took the old model for the new one."""
    unknown, plain = "unknown.safetensors", "plain.safetensors"
    state.begin()
    state.run(source="workflow x", words={unknown: "default"})
    state.change_file(file=unknown, touch=False)
    for words in ({unknown: "keep"}, {plain: "default"}, {unknown: "keep"}):
        state.run(source="workflow x", words=words)
