"""Without what newer versions of torch have added: the pack loads, offers its nodes, places, and draws the same."""

from __future__ import annotations

from pathlib import Path

from devtools.places import Places
from tests.host import workflows
from tests.host.conftest import StartHost
from tests.host.driver import PACK

HIDING = """
import torch
for name in ("accelerator", "get_device_module"):  # since 2.6 and 2.5; ComfyUI accepts 2.4
    delattr(torch, name)
NODE_CLASS_MAPPINGS = {}
"""


def test_the_pack_works_on_an_old_torch(start_host: StartHost, tmp_path: Path) -> None:
    folder = tmp_path / "aaa_old_torch"
    folder.mkdir()
    (folder / "__init__.py").write_text(HIDING)
    comfy = start_host(packs={folder.name: folder, PACK: Places.here().root})
    assert {"MultiGPUPlaceModel", "UNETLoaderDisTorch2MultiGPU"} <= comfy.client.get("/object_info").keys()
    stock = workflows.flux(seed=5)
    assert comfy.draw(workflows.placed(stock, "model", compute_device="cpu", mode="auto")) == comfy.draw(stock)
