"""Another pack uses our functions: loaded before ours, after it, and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from devtools.client import PromptFailed, RequestFailed, Workflow
from devtools.places import Places
from tests.host.conftest import StartHost
from tests.host.workflows import flux, node, placed

pytestmark = pytest.mark.newest
OTHER = """
class Keep:
    RETURN_TYPES, FUNCTION, CATEGORY = ("KIND",), "keep", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"given": ("KIND",)}}

    def keep(self, given):
        try:
            from comfyui_multigpu import set_keep_loaded
        except ImportError:
            print("NAME: there is no MultiGPU")
            return (given,)
        set_keep_loaded(given, "keep")
        return (given,)

NODE_CLASS_MAPPINGS = {"KeepNAME": Keep}
"""


@pytest.fixture
def others(tmp_path: Path) -> dict[str, Path]:
    """A pack that ComfyUI loads before ours, which keeps diffusion models, and one that it loads after, for VAEs."""
    folders = {}
    for name, kind in (("aaa_other", "MODEL"), ("zzz_other", "VAE")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "__init__.py").write_text(OTHER.replace("NAME", name).replace("KIND", kind))
    return folders


def keeping(workflow: Workflow, part: str, node_id: str) -> Workflow:
    """The workflow with a node between a loader and what uses it."""
    user = {"model": "sample", "vae": "decode"}[part]
    workflow[f"keep {part}"] = node(node_id, given=[part, 0])
    workflow[user]["inputs"][part] = [f"keep {part}", 0]
    return workflow


def test_another_pack_keeps_a_model(start_host: StartHost, others: dict[str, Path]) -> None:
    comfy = start_host(packs={"another_name": Places.here().root, **others})
    comfy.run(keeping(keeping(flux(seed=3), "model", "Keepaaa_other"), "vae", "Keepzzz_other"))
    comfy.free(unload_models=True, free_memory=True)
    assert {row["model_class"] for row in comfy.models() if row["alive"]} == {"Flux", "TAESD"}


def test_a_second_import_of_the_pack_says_what_to_import_and_harms_nothing(
    start_host: StartHost, tmp_path: Path
) -> None:
    """A second runtime would find ComfyUI's functions replaced by a stranger, and keep nothing."""
    ours, other = Places.here().root, tmp_path / "imports_files"
    other.mkdir()
    code = (
        OTHER.replace("NAME", other.name)
        .replace("KIND", "MODEL")
        .replace("comfyui_multigpu import", "multigpu.api import")
    )
    (other / "__init__.py").write_text(f"import sys\nsys.path.insert(0, {str(ours)!r})\n{code}")
    comfy = start_host(packs={"another_name": ours, other.name: other})
    workflow = placed(flux(seed=4), "vae", keep_loaded="keep")
    comfy.run(workflow)
    workflow = keeping(workflow, "model", f"Keep{other.name}")
    with pytest.raises(
        PromptFailed,
        match="multigpu is a second import of MultiGPU, which ComfyUI has loaded from .*"
        "another_name; import comfyui_multigpu",
    ):
        comfy.run(workflow)
    comfy.free(unload_models=True, free_memory=True)
    assert [row["model_class"] for row in comfy.models() if row["alive"]] == ["TAESD"]
    assert comfy.log().count("host symbols are as expected") == 1, "nothing was started a second time"


@pytest.mark.parametrize("off", [False, True], ids=["absent", "switched off"])
def test_without_our_pack_it_is_an_import_error(start_host: StartHost, others: dict[str, Path], off: bool) -> None:
    packs = {"another_name": Places.here().root, **others} if off else others
    comfy = start_host(packs=packs, environment={"MULTIGPU_ENABLED": "off"})
    comfy.run(keeping(flux(seed=3), "vae", "Keepzzz_other"))
    assert "zzz_other: there is no MultiGPU" in comfy.log()
    assert not [path for path in comfy.client.get("/extensions") if "another_name" in path], "nor does a tab ask them"
    for route in ("snapshot", "history", "settings"):
        with pytest.raises(RequestFailed) as failure:
            comfy.client.get(f"/multigpu/{route}")
        assert failure.value.status == 404, "the routes are off, too"
