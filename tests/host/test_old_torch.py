"""An older torch: one that the pack runs with, as far as that can be seen without it, and one that is too old.

On the CPU alone ComfyUI does the loading. The engine runs without newer functions in tests/engine, on the CPU, and in
tests/devices, on simulated devices.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from devtools.places import Places
from tests.host import workflows
from tests.host.conftest import StartHost
from tests.host.driver import PACK, Driver

pytestmark = pytest.mark.newest
HIDING = """
import torch
for name in ("accelerator", "get_device_module"):  # since 2.6 and 2.5; ComfyUI accepts 2.4
    vars(torch).pop(name, None)
vars(torch.mps).pop("recommended_max_memory", None)  # since 2.5
NODE_CLASS_MAPPINGS = {}
"""

TOO_OLD = """
import torch
torch.__version__ = "2.3.1"
NODE_CLASS_MAPPINGS = {}
"""


def start_after(source: str, start_host: StartHost, folder: Path) -> Driver:
    """A server that loads a pack with this source first, then ours."""
    (folder / "first" / "old_torch").mkdir(parents=True)
    (folder / "first" / "old_torch" / "__init__.py").write_text(source)
    return start_host(packs={PACK: Places.here().root}, first_packs=folder / "first")


def test_the_pack_works_on_an_old_torch(start_host: StartHost, tmp_path: Path) -> None:
    comfy = start_after(HIDING, start_host, tmp_path)
    assert {"MultiGPUPlaceModel", "UNETLoaderDisTorch2MultiGPU"} <= comfy.client.get("/object_info").keys()
    stock = workflows.flux(seed=5)
    assert comfy.draw(workflows.placed(stock, "model", compute_device="cpu", mode="auto")) == comfy.draw(stock)


def test_a_torch_that_is_too_old_gets_a_sentence_and_no_nodes(start_host: StartHost, tmp_path: Path) -> None:
    comfy = start_after(TOO_OLD, start_host, tmp_path)
    log = comfy.log()
    (line,) = (line for line in log.splitlines() if "[MultiGPU]" in line)
    assert "is not loaded: it needs torch 2.4 or newer, and this is torch 2.3.1; update it in the Python that" in line
    assert "ERROR" in line and comfy.our_tracebacks() == []
    assert re.search(rf"seconds: \S+custom_nodes\S+{PACK}$", log, re.MULTILINE), "ComfyUI calls it a failed import"
    modules = {info["python_module"] for info in comfy.client.get("/object_info").values()}
    assert "nodes" in modules and f"custom_nodes.{PACK}" not in modules
    assert comfy.draw(workflows.flux(seed=5))
