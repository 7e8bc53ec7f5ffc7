"""Our pack inside every host version: it loads quietly and changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from devtools import workflows
from tests.host.conftest import StartHost
from tests.host.driver import Driver, tracebacks_of

PATCHING_PACK = """
import comfy.model_management
original = comfy.model_management.soft_empty_cache
def replaced(*arguments, **named):
    return original(*arguments, **named)
comfy.model_management.soft_empty_cache = replaced
comfy.model_management.LoadedModel.is_dead = lambda self: False
NODE_CLASS_MAPPINGS = {}
"""


def test_it_loads_with_one_line_and_no_warning(comfy: Driver) -> None:
    log = comfy.log()
    assert log.count("[MultiGPU]") == 1
    assert re.search(r"seconds: \S+custom_nodes\S+multigpu$", log, re.MULTILINE), "not in the list of imported packs"
    about_us = re.compile(r"(WARNING|ERROR).*(custom_nodes[/\\\\]multigpu|\[MultiGPU\])")
    assert [line for line in log.splitlines() if about_us.search(line)] == []


def test_object_info_works(comfy: Driver) -> None:
    info = comfy.client.get("/object_info")
    assert "KSampler" in info


def test_the_host_is_untouched(comfy: Driver) -> None:
    comfy.run(workflows.flux(seed=21))
    comfy.free(unload_models=True, free_memory=True)
    assert comfy.patched() == []


def test_what_the_checks_look_for_is_found(start_host: StartHost, tmp_path: Path) -> None:
    """A pack that patches the host is named, with the functions it replaced; a traceback through a pack is seen."""
    (tmp_path / "patching").mkdir()
    (tmp_path / "patching" / "__init__.py").write_text(PATCHING_PACK)
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").write_text("from .inner import work\nwork()\n")
    (tmp_path / "failing" / "inner.py").write_text("def work():\n    raise ValueError('on purpose')\n")
    own = start_host(packs={name: tmp_path / name for name in ("patching", "failing")})

    found = {row["name"]: row["from"] for row in own.patched()}
    assert found.keys() == {"comfy.model_management.soft_empty_cache", "comfy.model_management.LoadedModel.is_dead"}
    assert all(Path(source).parent.name == "patching" for source in found.values())
    (traceback,) = tracebacks_of("failing", own.log())
    assert traceback.endswith("ValueError: on purpose")
    assert own.our_tracebacks() == []
