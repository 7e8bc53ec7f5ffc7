"""Our nodes for packs that manage devices themselves: their inputs, the device they run on, and what they leave."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pack import Pack
from tests.engine.studio import Studio

ROOT = Path(__file__).parents[1]
ARCHIVED: dict[str, Any] = json.loads((ROOT / "golden" / "archived_2_6_packs.json").read_text())["nodes"]
OTHER = ROOT / "packs" / "video_pack"
Run = Callable[..., tuple[Any, ...]]


def pack_nodes(pack: Pack) -> dict[str, Any]:
    from multigpu.nodes.packs import pack_nodes as made

    return {node.__name__: node for node in made(pack.runtime)}


@pytest.fixture
def run(studio: Studio, pack: Pack) -> Iterator[Run]:
    """Runs one of our nodes, with the pack loaded as ComfyUI loads packs."""
    import nodes

    before = dict(nodes.NODE_CLASS_MAPPINGS)
    assert asyncio.run(nodes.load_custom_node(str(OTHER)))
    made = pack_nodes(pack)
    yield lambda node_id, **inputs: tuple(made[f"{node_id}MultiGPU"].execute(**inputs).result)
    nodes.NODE_CLASS_MAPPINGS.clear()
    nodes.NODE_CLASS_MAPPINGS.update(before)


def globals_of_the_pack() -> dict[str, Any]:
    modules = {name: vars(module) for name, module in list(sys.modules.items()) if name.startswith(str(OTHER))}
    assert len(modules) > 3
    return {
        f"{name} {key}": values.get(key) for name, values in modules.items() for key in ("device", "offload_device")
    }


def stock(*, steps: int = 2) -> tuple[Any, ...]:
    """What the pack's own nodes sample."""
    import nodes

    (model,) = nodes.NODE_CLASS_MAPPINGS["WanVideoModelLoader"]().loadmodel("one", "bf16", "disabled", "main_device")
    return tuple(nodes.NODE_CLASS_MAPPINGS["WanVideoSampler"]().process(model, steps, seed=3))


def load(run: Run, device: str, **more: Any) -> tuple[Any, Any]:
    inputs = {"model": "one", "base_precision": "bf16", "quantization": "disabled", "load_device": "offload_device"}
    model, handed_on = run("WanVideoModelLoader", compute_device=device, **inputs | more)
    return model, handed_on


@pytest.mark.parametrize("node_id", ARCHIVED)
def test_a_node_has_the_inputs_and_outputs_of_the_archived_one(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, node_id: str
) -> None:
    """Made from a node of the other pack with the inputs that the archived pack knew of it."""
    import nodes

    from multigpu.nodes import pack_table

    rows = {row.target: row for row in (*pack_table.PACK_NODES, pack_table.BLOCK_SWAP)}
    row, archived = rows[node_id.removesuffix("MultiGPU")], ARCHIVED[node_id]
    theirs: dict[str, dict[str, Any]] = {"required": {}, "optional": {}}
    for name, section, kind in archived["inputs"]:
        if name not in (row.device, row.offload):
            theirs[section][name] = (["a"] if kind == "COMBO" else kind, {})
    if row.replaces:
        theirs["optional"][row.replaces] = (["gpu", "cpu"], {})
    returns = tuple(kind for kind in archived["outputs"] if kind != "MULTIGPUDEVICE")
    other = type(row.target, (), {"INPUT_TYPES": classmethod(lambda cls: theirs), "RETURN_TYPES": returns})
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, row.target, other)
    ours = pack_nodes(pack)[node_id]
    found = [
        [name, section, "COMBO" if isinstance(kind, list) else kind]
        for section, inputs in ours.INPUT_TYPES().items()
        if section != "hidden"
        for name, (kind, *_) in inputs.items()
    ]
    assert found == archived["inputs"]
    assert list(ours.RETURN_TYPES) == archived["outputs"]
    assert archived["pack"] == row.pack and archived["pack"] in ours.GET_SCHEMA().description


@pytest.mark.accelerator
def test_loader_and_sampler_run_on_the_chosen_device_and_leave_no_trace(studio: Studio, run: Run) -> None:
    import comfy.model_management as mm

    zero, one, _ = studio.accelerators
    before, usual = globals_of_the_pack(), (mm.get_torch_device, mm.unet_offload_device)
    want, _ = stock()
    model, handed_on = load(run, one)
    assert handed_on == one and model.load_device == torch.device(one)
    got, _ = run("WanVideoSampler", model=model, compute_device=handed_on, steps=2, seed=3)
    assert torch.equal(got["samples"], want["samples"])
    assert got["seen"] | {"computed": zero} == want["seen"]
    assert got["seen"]["computed"] == one and got["seen"]["fixed"] == "cpu"
    with pytest.raises(ValueError, match="101 steps are too many"):
        run("WanVideoSampler", model=model, compute_device=handed_on, steps=101, seed=3)
    with pytest.raises(ValueError, match="no weights for fp8"):
        load(run, one, quantization="fp8")
    assert globals_of_the_pack() == before
    assert (mm.get_torch_device, mm.unet_offload_device) == usual
    assert mm.get_torch_device() == torch.device(zero)


@pytest.mark.accelerator
def test_the_cpu_computes_and_no_device_is_comfyuis_own(studio: Studio, run: Run) -> None:
    zero, _, _ = studio.accelerators
    want, _ = stock()
    model, handed_on = load(run, "cpu")
    got, _ = run("WanVideoSampler", model=model, compute_device=handed_on, steps=2, seed=3)
    assert torch.equal(got["samples"], want["samples"]) and got["seen"]["computed"] == "cpu"
    got, _ = run("WanVideoSampler", model=model, compute_device=None, steps=2, seed=3)
    assert torch.equal(got["samples"], want["samples"]) and got["seen"]["computed"] == zero


@pytest.mark.accelerator
def test_blocks_are_swapped_to_the_device_of_the_block_swap_node(studio: Studio, run: Run) -> None:
    zero, one, two = studio.accelerators
    want, _ = stock()
    (swap,) = run("WanVideoBlockSwap", blocks_to_swap=2, swap_device=two)
    assert swap == {"blocks_to_swap": 2, "swap_device": two}
    model, handed_on = load(run, one, block_swap_args=swap)
    got, _ = run("WanVideoSampler", model=model, compute_device=handed_on, steps=2, seed=3)
    assert torch.equal(got["samples"], want["samples"])
    assert got["seen"]["rested"] == [two] and got["seen"]["transformer"] == [two, two]
    transformer = model.model.diffusion_model
    assert {transformer.offload_device, transformer.cache_device} == {torch.device("cpu")}
    (swap,) = run("WanVideoBlockSwap", blocks_to_swap=2, swap_device="cpu")
    model, handed_on = load(run, zero, block_swap_args=swap)
    got, _ = run("WanVideoSampler", model=model, compute_device=handed_on, steps=2, seed=3)
    assert got["seen"]["rested"] == ["cpu"]


@pytest.mark.accelerator
def test_a_node_that_asks_each_time_and_its_own_choice_of_a_device(studio: Studio, run: Run) -> None:
    _, one, _ = studio.accelerators
    encoder, handed_on = run("LoadWanVideoT5TextEncoder", model_name="t5", precision="fp32", device=one)
    assert encoder["load_device"] == "main_device" and str(encoder["weight"].device) == one
    (text,) = run("WanVideoTextEncode", positive_prompt="cat", t5=encoder, load_device=handed_on)
    assert text["device"] == "gpu" and str(text["embeds"].device) == one
    encoder, handed_on = run("LoadWanVideoT5TextEncoder", model_name="t5", precision="fp32", device="cpu")
    assert encoder["load_device"] == "offload_device" and str(encoder["weight"].device) == "cpu"
    (text,) = run("WanVideoTextEncode", positive_prompt="cat", t5=encoder, load_device=handed_on)
    assert text["device"] == "cpu" and str(text["embeds"].device) == "cpu"
    (text,) = run("WanVideoTextEncode", positive_prompt="cat", t5=encoder)
    assert text["device"] == "gpu" and str(text["embeds"].device) == studio.accelerators[0]


@pytest.mark.accelerator
def test_a_vae_computes_where_it_was_loaded_for(studio: Studio, run: Run) -> None:
    _, one, _ = studio.accelerators
    vae, handed_on = run("WanVideoVAELoader", model_name="vae", load_device=one)
    (picture,) = run("WanVideoDecode", vae=vae, load_device=handed_on, samples={"samples": torch.ones(8)})
    assert str(vae["main"]) == str(picture.device) == one


@pytest.mark.accelerator
def test_an_offload_device_and_a_line_about_the_node_that_computes_elsewhere(
    studio: Studio, pack: Pack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import comfy.model_management as mm
    import nodes

    class Loader:
        INPUT_TYPES, RETURN_TYPES, FUNCTION = classmethod(lambda cls: {}), ("FL2MODEL",), "load"

        def load(self) -> tuple[Any]:
            return ([str(mm.get_torch_device()), str(mm.unet_offload_device())],)

    _, one, two = studio.accelerators
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "Florence2ModelLoader", Loader)
    ours = pack_nodes(pack)["Florence2ModelLoaderMultiGPU"]
    caplog.set_level("INFO", "multigpu")
    assert ours.execute(device=one, offload_device=two).result == ([one, two],)
    assert f"Florence2ModelLoader runs on {one}. Florence2Run, which uses what is loaded, computes on" in caplog.text
    assert str(mm.unet_offload_device()) == "cpu"


def test_a_node_whose_names_do_not_fit_its_outputs_has_none_of_ours(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import nodes

    shape = {"INPUT_TYPES": classmethod(lambda cls: {}), "RETURN_TYPES": ("AUDIO",), "RETURN_NAMES": ("a", "b")}
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "MMAudioSampler", type("Sampler", (), shape))
    assert "MMAudioSamplerMultiGPU" not in pack_nodes(pack)
    assert "ComfyUI-MMAudio has changed: MMAudioSampler cannot tell its inputs and outputs" in caplog.text


def test_a_device_that_is_not_there_is_refused_with_the_list(studio: Studio, run: Run) -> None:
    for node_id, inputs in (
        ("WanVideoVAELoader", {"model_name": "vae", "load_device": "cuda:7"}),
        ("WanVideoBlockSwap", {"blocks_to_swap": 1, "swap_device": "cuda:7"}),
    ):
        with pytest.raises(Exception, match=r"cuda:7.*cpu"):
            run(node_id, **inputs)
