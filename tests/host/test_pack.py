"""Our pack inside every host version: it loads quietly and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools.client import RequestFailed
from devtools.hosts import Host
from devtools.places import Places
from multigpu.host.surface import SURFACE
from tests.host import workflows
from tests.host.conftest import StartHost, served
from tests.host.driver import DEBUG_PACKS, PACK, Driver, tracebacks_of

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


def test_nothing_of_other_machines_is_loaded_unless_a_cluster_is_named(untouched: Driver) -> None:
    loaded = untouched.client.get("/debug/modules")
    assert any(name.endswith(".multigpu.runtime") for name in loaded)
    assert [
        name for name in loaded if name.partition(".")[0] == "ray" or re.search(r"\.multigpu\.(host\.)?remote", name)
    ] == []


def test_object_info_works(comfy: Driver) -> None:
    info = comfy.client.get("/object_info")
    assert "KSampler" in info


def test_the_host_is_untouched(untouched: Driver) -> None:
    untouched.run(workflows.flux(seed=21))
    untouched.free(unload_models=True, free_memory=True)
    assert untouched.patched() == []
    assert untouched.models() == []
    assert untouched.log().count("[MultiGPU]") == 1, "a graph without our nodes has nothing to say about us"


@pytest.fixture(scope="module")
def spoiled(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A server with a pack that patches the host, one that fails, and ours with settings that mean nothing."""
    folder = tmp_path_factory.mktemp("spoiled")
    for name, source in (("patching", PATCHING_PACK), ("failing", "from .inner import work\nwork()\n")):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    (folder / "failing" / "inner.py").write_text("def work():\n    raise ValueError('on purpose')\n")
    packs = {"patching": folder / "patching", "failing": folder / "failing", PACK: Places.here().root}
    environment = {"MULTIGPU_LOG": "perhaps", "MULTIGPU_FALLBACK": "on"}
    settings = {"MultiGPU.FallBack": True, "MultiGPU.RamLimit": "most"}
    yield from served(host, folder / "base", packs=packs, environment=environment, settings=settings)


def test_a_pack_that_patches_the_host_is_named(spoiled: Driver) -> None:
    """The checks above mean something: the functions that were replaced are found, and who did it."""
    found = {row["name"]: row["from"] for row in spoiled.patched()}
    assert found.keys() == {"comfy.model_management.soft_empty_cache", "comfy.model_management.LoadedModel.is_dead"}
    assert all(Path(source).parent.name == "patching" for source in found.values())


def test_a_traceback_through_a_pack_is_seen(spoiled: Driver) -> None:
    (traceback,) = tracebacks_of("failing", spoiled.log())
    assert traceback.endswith("ValueError: on purpose")
    assert spoiled.our_tracebacks() == []


def test_a_setting_that_means_nothing_is_named_and_the_nodes_are_there(spoiled: Driver) -> None:
    """Once, in a warning; a name that no setting has, too."""
    lines = [line for line in spoiled.log().splitlines() if "[MultiGPU]" in line]
    assert len(lines) == 4
    assert "MULTIGPU_LOG is 'perhaps', but it can be debug, info, warning, error: info is used" in lines[1]
    assert "there is no setting MULTIGPU_FALLBACK; there are MULTIGPU_ENABLED, MULTIGPU_LOG, " in lines[2]
    assert "in ComfyUI's settings, ram_limit is 'most'; it can be a percentage from 1 to 100" in lines[3]
    told = spoiled.client.get("/multigpu/settings")
    assert {name: (its["value"], its["source"]) for name, its in told.items()} == {
        "fall_back": (True, "settings"), "ram_limit": (None, "default"), "log_level": ("info", "default"),
    }  # fmt: skip
    assert "MultiGPUPlaceModel" in spoiled.client.get("/object_info")


def test_where_keep_and_eject_are_off_the_panel_says_so(spoiled: Driver) -> None:
    """Another pack has replaced a function that they need. What is in memory is shown all the same."""
    spoiled.run(workflows.flux(seed=8, steps=1))
    models = spoiled.client.get("/multigpu/snapshot")["models"]
    assert {model["name"] for model in models} == {row["model_class"] for row in spoiled.models()}
    for route in ("pin", "unpin", "eject"):
        with pytest.raises(RequestFailed, match="keep and eject are off") as failure:
            spoiled.client.post(f"/multigpu/{route}", {"model": models[0]["id"]})
        assert failure.value.status == 409


@pytest.mark.newest
def test_of_two_copies_the_second_says_so_and_does_nothing(start_host: StartHost, tmp_path: Path) -> None:
    """Which one ComfyUI loads first is up to the file system; the pictures are drawn all the same."""
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(Places.here().root / "__init__.py", copy)
    for part in ("multigpu", "web"):
        shutil.copytree(Places.here().root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    comfy = start_host(packs={PACK: Places.here().root, f"{PACK}-main": copy})
    started, twice = (line for line in comfy.log().splitlines() if "[MultiGPU]" in line)
    assert "host symbols are as expected" in started
    found = re.search(r"ComfyUI has loaded (.*), so (.*) offers no nodes; remove one of the two$", twice)
    assert found is not None and "WARNING" in twice.upper()
    first, second = (Path(folder).name for folder in found.groups())
    assert {first, second} == {PACK, f"{PACK}-main"}
    modules = [info["python_module"] for info in comfy.client.get("/object_info").values()]
    ours = [module for module in modules if module.startswith(f"custom_nodes.{PACK}")]
    assert len(ours) > 30 and set(ours) == {f"custom_nodes.{first}"}
    scripts = [path for path in comfy.client.get("/extensions") if path.endswith("memory_report.js")]
    assert scripts == [f"/extensions/{first}/memory_report.js"]
    assert comfy.patched() == []
    assert comfy.draw(workflows.flux(seed=5))


@pytest.mark.newest
def test_two_comfyui_share_one_folder_of_the_pack(start_host: StartHost) -> None:
    """Nothing is written to it, and each process has its own choices: a free in one unloads nothing in the other."""
    folder = Places.here().root
    before = files_of(folder)
    one, two = start_host(), start_host()
    for comfy in (one, two):
        comfy.client.submit(workflows.placed(workflows.flux(seed=6), "model", keep_loaded="keep"))
    for comfy in (one, two):
        comfy.wait_idle(timeout=300)
    loaded = [row["patcher_id"] for row in two.models()]
    one.free(unload_models=True, free_memory=True)
    assert [row["model_class"] for row in one.models()] == ["Flux"]
    assert [row["patcher_id"] for row in two.models()] == loaded and len(loaded) == 3
    pictures = [
        comfy.draw(workflows.placed(workflows.flux(seed=7), "model", keep_loaded="keep")) for comfy in (one, two)
    ]
    assert pictures[0] == pictures[1]
    assert files_of(folder) == before


def files_of(folder: Path) -> dict[Path, int]:
    """The pack's files with their times of change, without compiled bytecode and what the tests write."""
    parts = ("__init__.py", "multigpu", "web", "locales", "example_workflows")
    found = (path for part in parts for path in (folder / part, *(folder / part).rglob("*.*")))
    return {path: path.stat().st_mtime_ns for path in found if path.is_file() and path.suffix != ".pyc"}


IMPORT_THE_SEAM = """
import logging, sys
from pathlib import Path
root, tree, debug_pack = sys.argv[1:4]
sys.path[:0] = [root, debug_pack]
from multigpu.host import comfyui_tree
comfyui_tree.enter(Path(tree))
import comfy.sd, execution, nodes
from snapshot import Snapshot
before = Snapshot.of_the_host()
assert len(before) > 1000
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
for path in sorted(Path(root, "multigpu").rglob("*.py")):
    if path.name != "__main__.py":
        __import__(".".join(path.relative_to(root).with_suffix("").parts))
assert before.differences() == [], before.differences()
assert said == [], said
"""


def test_importing_the_seam_changes_nothing(host: Host) -> None:
    """All of `multigpu`, also what ComfyUI's loading of the pack does not import yet."""
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


@pytest.mark.newest
@pytest.mark.skipif(os.name != "posix", reason="links that need no rights, and a POSIX shell")
def test_doctor_finds_the_comfyui_that_the_pack_is_linked_into_and_its_file(host: Host, tmp_path: Path) -> None:
    """As people start it: they go to the pack's folder in `custom_nodes`, which is a link, and call it there.

    The file names a cluster, which cannot be used.
    """
    pack = tmp_path / "custom_nodes" / PACK
    pack.parent.mkdir()
    pack.symlink_to(Places.here().root, target_is_directory=True)
    for entry in Places.here().host_tree(host.version).iterdir():
        if entry.name == "folder_paths.py":  # finds the user directory beside itself
            shutil.copy(entry, tmp_path)
        elif entry.name not in ("custom_nodes", "user"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "user" / "__multigpu").mkdir(parents=True)
    (tmp_path / "user" / "__multigpu" / "ray_head").write_text("127.0.0.1:9\n")
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(pack), sys.executable, "-m", "multigpu", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"ComfyUI       {host.version}\n" in result.stdout
    assert "\nRay cluster   127.0.0.1:9\n" in result.stdout
