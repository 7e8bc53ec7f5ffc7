"""Another pack uses our functions: loaded before ours, after it, and without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from devtools.client import PromptFailed, RequestFailed, Workflow
from devtools.places import Places
from tests.host.conftest import StartHost
from tests.host.driver import DEBUG_PACKS
from tests.host.workflows import flux, node, placed

pytestmark = pytest.mark.newest
OTHER = """
import sys
print("NAME is loaded", "after MultiGPU" if "comfyui_multigpu" in sys.modules else "before MultiGPU", flush=True)

class Keep:
    RETURN_TYPES, FUNCTION, CATEGORY = ("KIND",), "keep", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"given": ("KIND",)}}

    def keep(self, given):
        try:
            from comfyui_multigpu import set_keep_loaded
        except ImportError:
            print("NAME: there is no MultiGPU", flush=True)
            return (given,)
        set_keep_loaded(given, "keep")
        return (given,)

class Wrong:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "call", "test", True
    INPUT_TYPES = classmethod(lambda cls: {})

    def call(self):
        from comfyui_multigpu import add_retention_anchor, set_keep_loaded
        for give in (lambda: set_keep_loaded(None, "keep"), lambda: add_retention_anchor(5)):
            try:
                give()
            except ValueError as problem:
                print("NAME was told that", problem, flush=True)
        return ()

NODE_CLASS_MAPPINGS = {"KeepNAME": Keep, "WrongNAME": Wrong}
"""


@pytest.fixture
def others(tmp_path: Path) -> dict[str, Path]:
    """Folders for `ServerSpec`: the debug pack and one that keeps diffusion models are loaded before our pack, one that
    keeps VAEs after it."""
    folders = {"first_packs": tmp_path / "first", "last_packs": tmp_path / "last"}
    shutil.copytree(DEBUG_PACKS, folders["first_packs"], ignore=shutil.ignore_patterns("__pycache__"))
    for folder, name, kind in (("first_packs", "early_other", "MODEL"), ("last_packs", "late_other", "VAE")):
        pack = folders[folder] / name
        pack.mkdir(parents=True)
        (pack / "__init__.py").write_text(OTHER.replace("NAME", name).replace("KIND", kind))
    return folders


def keeping(workflow: Workflow, part: str, node_id: str) -> Workflow:
    """The workflow with a node between a loader and what uses it."""
    user = {"model": "sample", "vae": "decode"}[part]
    workflow[f"keep {part}"] = node(node_id, given=[part, 0])
    workflow[user]["inputs"][part] = [f"keep {part}", 0]
    return workflow


def test_another_pack_keeps_a_model(start_host: StartHost, others: dict[str, Path]) -> None:
    comfy = start_host(packs={"another_name": Places.here().root}, **others)
    assert "early_other is loaded before MultiGPU" in comfy.log()
    assert "late_other is loaded after MultiGPU" in comfy.log()
    comfy.run({"wrong": node("Wronglate_other")})
    for kind in ("NoneType", "int"):
        assert f"was told that a {kind} cannot be kept or ejected: it is no MODEL, CLIP" in comfy.log()
    assert comfy.patched() == [], "what is wrong changes nothing"
    comfy.run(keeping(keeping(flux(seed=3), "model", "Keepearly_other"), "vae", "Keeplate_other"))
    comfy.free(unload_models=True, free_memory=True)
    assert {row["model_class"] for row in comfy.models() if row["alive"]} == {"Flux", "TAESD"}


@pytest.mark.parametrize("called", ["in its node", "at its import, too"])
def test_a_second_import_of_the_pack_says_what_to_import_and_harms_nothing(
    start_host: StartHost, others: dict[str, Path], called: str
) -> None:
    """A second runtime would find ComfyUI's functions replaced by a stranger, and keep nothing.

    A pack that is loaded before ours and calls a function at once has started one before ours is there.
    """
    ours, file = Places.here().root, others["first_packs"] / "early_other" / "__init__.py"
    early = "import multigpu.api\nmultigpu.api.soft_empty_cache_multigpu()\n" if "import" in called else ""
    code = file.read_text().replace("comfyui_multigpu import", "multigpu.api import")
    file.write_text(f"import sys\nsys.path.insert(0, {str(ours)!r})\n{early}{code}")
    comfy = start_host(packs={"another_name": ours}, **others)
    assert "early_other is loaded before MultiGPU" in comfy.log()
    workflow = placed(flux(seed=4), "vae", keep_loaded="keep")
    comfy.run(workflow)
    workflow = keeping(workflow, "model", "Keepearly_other")
    with pytest.raises(
        PromptFailed,
        match="multigpu is a second import of MultiGPU, which ComfyUI has loaded from .*"
        "another_name; import comfyui_multigpu",
    ):
        comfy.run(workflow)
    comfy.free(unload_models=True, free_memory=True)
    assert [row["model_class"] for row in comfy.models() if row["alive"]] == ["TAESD"]
    started = comfy.log().count("host symbols are as expected")
    assert started == (2 if early else 1), "nothing was started a second time after ours"


@pytest.mark.parametrize("off", [False, True], ids=["absent", "switched off"])
def test_without_our_pack_it_is_an_import_error(start_host: StartHost, others: dict[str, Path], off: bool) -> None:
    packs = {"another_name": Places.here().root} if off else {}
    comfy = start_host(packs=packs, environment={"MULTIGPU_ENABLED": "off"}, **others)
    comfy.run(keeping(flux(seed=3), "vae", "Keeplate_other"))
    assert "late_other: there is no MultiGPU" in comfy.log()
    assert not [path for path in comfy.client.get("/extensions") if "another_name" in path], "nor does a tab ask them"
    for route in ("snapshot", "history", "settings"):
        with pytest.raises(RequestFailed) as failure:
            comfy.client.get(f"/multigpu/{route}")
        assert failure.value.status == 404, "the routes are off, too"
