"""Another pack uses our functions: loaded before ours, after it, and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from devtools.places import Places
from tests.host.conftest import StartHost
from tests.host.workflows import flux, node

OTHER = """
class Keep:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "keep", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def keep(self, model):
        try:
            from comfyui_multigpu import set_keep_loaded
        except ImportError:
            print("NAME: there is no MultiGPU")
            return (model,)
        set_keep_loaded(model, "keep")
        return (model,)

NODE_CLASS_MAPPINGS = {"KeepNAME": Keep}
"""


@pytest.fixture
def others(tmp_path: Path) -> dict[str, Path]:
    """A pack that ComfyUI loads before ours, and one that it loads after."""
    folders = {}
    for name in ("aaa_other", "zzz_other"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "__init__.py").write_text(OTHER.replace("NAME", name))
    return folders


@pytest.mark.parametrize("name", ["aaa_other", "zzz_other"])
def test_another_pack_keeps_a_model(start_host: StartHost, others: dict[str, Path], name: str) -> None:
    comfy = start_host(packs={"another_name": Places.here().root, **others})
    workflow = flux(seed=3)
    workflow["keep"] = node(f"Keep{name}", model=["model", 0])
    workflow["sample"]["inputs"]["model"] = ["keep", 0]
    comfy.run(workflow)
    comfy.free(unload_models=True, free_memory=True)
    assert [row["model_class"] for row in comfy.models() if row["alive"]] == ["Flux"]


@pytest.mark.parametrize("off", [False, True], ids=["absent", "switched off"])
def test_without_our_pack_it_is_an_import_error(start_host: StartHost, others: dict[str, Path], off: bool) -> None:
    packs = {"another_name": Places.here().root, **others} if off else others
    comfy = start_host(packs=packs, environment={"MULTIGPU_ENABLED": "off"})
    workflow = flux(seed=3)
    workflow["keep"] = node("Keepzzz_other", model=["model", 0])
    workflow["sample"]["inputs"]["model"] = ["keep", 0]
    comfy.run(workflow)
    assert "zzz_other: there is no MultiGPU" in comfy.log()
