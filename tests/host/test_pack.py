"""Our pack inside every host version: it loads quietly and changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from devtools import workflows
from devtools.hosts import Host
from devtools.places import Places
from multigpu.host.surface import SURFACE
from tests.host.conftest import StartHost
from tests.host.driver import DEBUG_PACKS, Driver, tracebacks_of

PATCHING_PACK = """
import comfy.model_management
original = comfy.model_management.soft_empty_cache
def replaced(*arguments, **named):
    return original(*arguments, **named)
comfy.model_management.soft_empty_cache = replaced
comfy.model_management.LoadedModel.is_dead = lambda self: False
NODE_CLASS_MAPPINGS = {}
"""


def test_it_loads_with_one_line_and_no_warning(untouched: Driver) -> None:
    log = untouched.log()
    assert log.count("[MultiGPU]") == 1
    assert re.search(r"seconds: \S+custom_nodes\S+multigpu$", log, re.MULTILINE), "not in the list of imported packs"
    about_us = re.compile(r"(WARNING|ERROR).*(custom_nodes[/\\\\]multigpu|\[MultiGPU\])")
    assert [line for line in log.splitlines() if about_us.search(line)] == []


def test_object_info_works(comfy: Driver) -> None:
    info = comfy.client.get("/object_info")
    assert "KSampler" in info


def test_the_host_is_untouched(untouched: Driver) -> None:
    untouched.run(workflows.flux(seed=21))
    untouched.free(unload_models=True, free_memory=True)
    assert untouched.patched() == []
    assert untouched.models() == []
    assert untouched.log().count("[MultiGPU]") == 1, "a graph without our nodes has nothing to say about us"


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


IMPORT_THE_SEAM = """
import logging, sys
from pathlib import Path
root, tree, debug_pack = sys.argv[1:4]
sys.path[:0] = [root, debug_pack]
from multigpu.host import outside
outside.enter(Path(tree))
import comfy.sd, execution, nodes
from snapshot import Snapshot
before = Snapshot.of_the_host()
assert len(before) > 1000
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
for path in sorted(Path(root, "multigpu", "host").glob("*.py")):
    __import__(f"multigpu.host.{path.stem}")
assert before.differences() == [], before.differences()
assert said == [], said
"""


def test_importing_the_seam_changes_nothing(host: Host) -> None:
    """All of `multigpu/host`, also what ComfyUI's loading of the pack does not import yet."""
    places = Places.here()
    arguments = [places.root, places.host_tree(host.version), DEBUG_PACKS / "multigpu_debug"]
    command = [sys.executable, "-c", IMPORT_THE_SEAM, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_every_symbol_of_the_surface_is_as_expected(comfy: Driver, host: Host) -> None:
    """In the running host by its log line, and in the tree by `multigpu doctor`."""
    expected = f"all {len(SURFACE)} host symbols are as expected"
    assert re.search(rf"\[MultiGPU\] \S+ on ComfyUI {re.escape(host.version)}: {expected}", comfy.log())
    tree = Places.here().host_tree(host.version)
    command = [sys.executable, "-m", "multigpu", "doctor", "--all", "--comfyui", str(tree)]
    result = subprocess.run(command, cwd=Places.here().root, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert expected in result.stdout
    assert all(f"  {symbol.name}\n      ok; {symbol.why}" in result.stdout for symbol in SURFACE)


def test_a_setting_that_means_nothing_is_named(start_host: StartHost) -> None:
    own = start_host(environment={"MULTIGPU_LOG": "perhaps"})
    assert "MULTIGPU_LOG is 'perhaps'; it can be debug, info, warning, error" in own.log()
    assert "KSampler" in own.client.get("/object_info")
