"""The `keep_loaded` choices (the words keep, eject, default) are read from the prompt, also if a node does not run."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from devtools.client import Workflow
from tests.host import file_opens
from tests.host.conftest import StartHost
from tests.host.lifecycle import BOTH, FILES, LORA, OTHER_VAE, PACKS, Keeper, own_models, short
from tests.host.workflows import node

linux = pytest.mark.skipif(not file_opens.AVAILABLE, reason="inotify is a part of Linux")
WORDS = ("default", "keep", "eject")
SEEDS = itertools.count()


def use(*components: list[Any]) -> dict[str, Any]:
    """An output node that loads the components, and runs every time."""
    return node("TestUse", seed=next(SEEDS), **dict(zip(("one", "two", "three"), components, strict=False)))


def loaded_by(word: Any, name: str = "toy_taef1.safetensors") -> Workflow:
    """A VAE from a loader that has the widget."""
    loader = node("VAELoaderDisTorch2MultiGPU", vae_name=name, compute_device="cpu", virtual_vram_gb=0.0,
                  donor_device="cpu", keep_loaded=word)  # fmt: skip
    return {"loader": loader, "use": use(["loader", 0])}


def placed_by(word: Any, loader: dict[str, Any] | None = None) -> Workflow:
    """A VAE from another loader, with a place node; the place node is listed first, so the host asks for it first."""
    return {
        "place": node("MultiGPUPlaceVAE", vae=["other", 0], keep_loaded=word),
        "other": loader or node("VAELoader", vae_name="toy_wan_vae.safetensors"),
        "use": use(["place", 0]),
    }


def both(word: Any) -> Workflow:
    return {**loaded_by(word), **placed_by(word), "use": use(["loader", 0], ["place", 0])}


def vaes(keeper: Keeper) -> Counter[str]:
    return Counter(row["model_class"] for row in keeper.models())


def alive(keeper: Keeper) -> list[tuple[str, int, float]]:
    return [tuple(row) for row in keeper.client.get("/lifecycle/alive")]


@pytest.fixture
def altered(keeper: Keeper) -> Iterator[Any]:
    """Replaces a model file by one with other weights; the old file is restored after the test."""
    before: dict[Path, bytes] = {}

    def alter(name: str) -> None:
        file = keeper.server.spec.models / name
        before.setdefault(file, file.read_bytes())
        changed = file.with_suffix(".changed")
        save_file(
            {key: value * 1.5 if value.is_floating_point() else value for key, value in load_file(file).items()},
            changed,
        )
        os.replace(changed, file)

    yield alter
    for file, contents in before.items():
        file.with_suffix(".before").write_bytes(contents)
        os.replace(file.with_suffix(".before"), file)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_sequence_of_words_ends_as_its_last_word_says(keeper: Keeper, length: int) -> None:
    """With a loader that has the widget and with a place node; each sequence starts with nothing loaded or chosen."""
    for words in itertools.product(WORDS, repeat=length):
        keeper.forget()
        for word in words:
            keeper.run(both(word))
        keeper.free(**BOTH)
        expected = Counter({"TAESD": 1, "WanVAE": 1}) if words[-1] == "keep" else Counter()
        assert vaes(keeper) == expected, f"after {', '.join(words)}"


def test_text_encoders_and_diffusion_models(keeper: Keeper) -> None:
    """The same with our loader nodes for diffusion models and text encoders."""

    def workflow(word: str) -> Workflow:
        made = short(1)
        made["model"] = node(
            "UNETLoaderDisTorch2MultiGPU", unet_name="toy_flux.safetensors", weight_dtype="default",
            compute_device="cpu", virtual_vram_gb=0.0, donor_device="cpu", keep_loaded=word,
        )  # fmt: skip
        made["clip"] = node("CLIPLoaderDisTorch2MultiGPU", clip_name="toy_clip_l.safetensors", type="sd3", device="cpu",
                            virtual_vram_gb=0.0, donor_device="cpu", keep_loaded=word)  # fmt: skip
        return {**made, "use": use(["clip", 0])}

    for words in (("keep", "eject", "keep"), ("eject", "keep", "eject"), ("keep", "default", "keep")):
        keeper.forget()
        for word in words:
            keeper.run(workflow(word))
        keeper.free(**BOTH)
        assert ("Flux" in keeper.names(), "SD3ClipModel_" in keeper.names()) == (words[-1] == "keep",) * 2, words


def test_with_a_cache_of_fixed_size(start_host: StartHost, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Such a cache keeps the outputs of earlier prompts too, so that nodes seldom run twice."""
    folder = own_models(tmp_path_factory.mktemp("models"))
    own = Keeper(start_host(packs=PACKS, models=folder, flags=("--cpu", "--cache-lru", "100")).server)
    for words in itertools.permutations(WORDS):
        own.forget()
        for word in (*words, words[0]):
            own.run(both(word))
        own.free(**BOTH)
        assert bool(vaes(own)) == (words[0] == "keep"), words


def test_a_lora_whose_file_changed(keeper: Keeper, altered: Any) -> None:
    """The model stays, and the picture is made with the new LoRA."""
    old = keeper.draw(short(81, lora=0.9))
    keeper.forget()
    assert keeper.draw(short(81, lora=0.9, model="keep")) == old
    kept = keeper.objects()["Flux"][1]
    keeper.free(**BOTH)
    altered(LORA)
    picture = keeper.draw(short(81, lora=0.9, model="keep"))
    assert keeper.objects()["Flux"][1] == kept
    keeper.forget()
    assert picture == keeper.draw(short(81, lora=0.9)) != old


UNKNOWN_LOADER = node("TestLoadVAE", vae_name="toy_wan_vae.safetensors")


def test_a_loader_that_cannot_be_repeated(keeper: Keeper, altered: Any) -> None:
    """A model from a loader that does not tell ComfyUI how it loads: its file is checked all the same.

    If the file is unchanged, the model is handed back; if it has changed, it is loaded again.
    """
    keeper.run(placed_by("keep", UNKNOWN_LOADER))
    (first,) = alive(keeper)
    keeper.free(**BOTH)
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(placed_by("keep", UNKNOWN_LOADER))
        assert alive(keeper) == [first] and opens.take() == {}
    keeper.free(**BOTH)
    altered(OTHER_VAE)
    keeper.run(placed_by("keep", UNKNOWN_LOADER))
    (second,) = alive(keeper)
    assert second[2] != first[2], "the new weights"
    assert keeper.held() == ["WanVAE"]
    assert keeper.client.get("/lifecycle/before") == [], "the old model was gone before the new one was loaded"


def test_a_loader_node_of_ours_for_a_model_that_cannot_be_repeated(keeper: Keeper, altered: Any) -> None:
    """Our own loader nodes check the file too before they return the model of an earlier prompt."""
    keeper.run(loaded_by("keep"))
    (first,) = alive(keeper)
    altered(FILES["vae"])
    keeper.free(**BOTH)
    keeper.run(loaded_by("eject"))
    (second,) = alive(keeper)
    assert second[2] != first[2]


def test_two_nodes_speak_of_one_model_and_one_of_them_is_cached(keeper: Keeper) -> None:
    """First keep and default, then keep and eject: keep wins, although its node does not run the second time."""

    def workflow(first: str, second: str) -> Workflow:
        return {
            "loader": node("VAELoader", vae_name="toy_taef1.safetensors"),
            "a": node("MultiGPUPlaceVAE", vae=["loader", 0], keep_loaded=first),
            "b": node("MultiGPUPlaceVAE", vae=["loader", 0], keep_loaded=second, compute_device="cpu"),
            "use": use(["a", 0], ["b", 0]),
        }

    keeper.run(workflow("keep", "default"))
    assert "a" in keeper.run(workflow("keep", "eject")).cached_nodes
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"]
    keeper.run(workflow("default", "eject"))
    keeper.free(**BOTH)
    assert keeper.names() == [], "default withdraws the first node's keep"


@pytest.mark.parametrize("place_first", [True, False])
def test_one_of_two_models_of_a_loader_is_kept(keeper: Keeper, place_first: bool) -> None:
    """The loader has to run again for the model that was not kept; afterwards there are two models, not three."""
    place = {"place": node("MultiGPUPlaceVAE", vae=["two", 0], keep_loaded="keep")}
    loader = {"two": node("TestLoadTwoVAEs", vae_name="toy_taef1.safetensors")}

    def workflow() -> Workflow:
        parts = {**place, **loader} if place_first else {**loader, **place}
        return {**parts, "use": use(["place", 0], ["two", 1])}

    keeper.run(workflow())
    keeper.free(**BOTH)
    assert len(alive(keeper)) == 1
    for _ in range(2):
        keeper.run(workflow())
        assert len(alive(keeper)) == 2
        assert keeper.held() == ["TAESD"]
        keeper.free(**BOTH)


def test_one_output_of_a_loader_is_enough_if_nothing_else_is_asked_for(keeper: Keeper) -> None:
    workflow = {
        "place": node("MultiGPUPlaceVAE", vae=["two", 0], keep_loaded="keep"),
        "two": node("TestLoadTwoVAEs", vae_name="toy_taef1.safetensors"),
    }
    keeper.run({**workflow, "use": use(["place", 0])})
    keeper.free(**BOTH)
    (kept,) = alive(keeper)
    keeper.run({**workflow, "use": use(["place", 0])})
    assert alive(keeper) == [kept]


def test_two_files_of_one_kind_and_size(start_host: StartHost, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without any cache of the executor both are kept, and neither is taken for a copy of the other."""
    folder = own_models(tmp_path_factory.mktemp("models"))
    second = folder / "vae" / "second.safetensors"
    torch.manual_seed(1)
    save_file({key: value + 0.25 for key, value in load_file(folder / FILES["vae"]).items()}, second)
    own = Keeper(start_host(packs=PACKS, models=folder, flags=("--cpu", "--cache-none")).server)
    workflow = {
        **{
            name: node("TestLoadVAE", vae_name=file)
            for name, file in (("one", "toy_taef1.safetensors"), ("two", "second.safetensors"))
        },
        "place one": node("MultiGPUPlaceVAE", vae=["one", 0], keep_loaded="keep"),
        "place two": node("MultiGPUPlaceVAE", vae=["two", 0], keep_loaded="keep"),
    }
    for _ in range(3):
        own.run({**workflow, "use": use(["place one", 0], ["place two", 0])})
        own.free(**BOTH)
        assert own.held() == ["TAESD", "TAESD"]
        sums = [row[2] for row in alive(own)]
        assert len(sums) == 2 == len(set(sums)), "one of each"


def test_a_node_that_expands_to_a_loader_and_a_place_node(keeper: Keeper, altered: Any) -> None:
    """The file that its loader reads is checked, though none of its own inputs names it; its `keep_loaded` counts."""

    def workflow(word: str) -> Workflow:
        return {"all": node("TestAllInOne", number=0, keep_loaded=word), "use": use(["all", 0])}

    keeper.run(workflow("keep"))
    (first,) = alive(keeper)
    keeper.free(**BOTH)
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(workflow("keep"))
        assert opens.take() == {} and alive(keeper) == [first]
    altered(FILES["vae"])
    keeper.free(**BOTH)
    keeper.run(workflow("keep"))
    (second,) = alive(keeper)
    assert second[2] != first[2]
    for words in itertools.permutations(WORDS):
        keeper.forget()
        for word in words:
            keeper.run(workflow(word))
        keeper.free(**BOTH)
        assert bool(keeper.names()) == (words[-1] == "keep"), words


def test_other_clients_and_workflows_have_nodes_of_the_same_id(keeper: Keeper) -> None:
    """`default` in another client or workflow does not withdraw a keep; `eject` there replaces it."""
    keeper.run(loaded_by("keep"), client_id="a")
    keeper.run(loaded_by("default"), client_id="b")
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"]
    keeper.run(loaded_by("default"), client_id="a")
    keeper.free(**BOTH)
    assert keeper.names() == []
    ui = [{"extra_data": {"extra_pnginfo": {"workflow": {"id": name}}}} for name in ("first", "second")]
    keeper.run(loaded_by("keep"), client_id="a", **ui[0])
    keeper.run(loaded_by("default"), client_id="a", **ui[1])
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"], "one client, two workflows"
    keeper.run(loaded_by("default"), client_id="another tab", **ui[0])
    keeper.free(**BOTH)
    assert keeper.names() == [], "the same workflow in another tab"
    keeper.run(loaded_by("keep"), client_id="a")
    keeper.run(loaded_by("eject"), client_id="b")
    keeper.free(**BOTH)
    assert keeper.names() == []


def test_a_word_that_comes_from_another_node(keeper: Keeper) -> None:
    """The choice is known once the node has run, and counts in later prompts in which the node does not run."""

    def workflow(word: str) -> Workflow:
        return {"word": node("TestWord", value=word), **loaded_by(["word", 0])}

    for words in (("keep", "eject", "keep"), ("eject", "keep", "eject"), ("keep", "keep", "default")):
        keeper.forget()
        for word in words:
            keeper.run(workflow(word))
        keeper.free(**BOTH)
        assert bool(keeper.names()) == (words[-1] == "keep"), words


def test_a_node_that_is_not_in_the_prompt_says_nothing(keeper: Keeper) -> None:
    """If it is muted, bypassed or deleted, its earlier choice still applies."""
    keeper.run(placed_by("keep"))
    bypassed = placed_by("keep")
    del bypassed["place"]
    keeper.run({**bypassed, "use": use(["other", 0])})
    keeper.free(**BOTH)
    assert keeper.names() == ["WanVAE"]
    keeper.run(placed_by("eject"))
    keeper.free(**BOTH)
    assert keeper.names() == []


@linux
def test_changing_a_place_nodes_word_reads_and_moves_nothing(keeper: Keeper) -> None:
    keeper.run(placed_by("keep"))
    before = keeper.objects()
    with file_opens.watch(keeper.server.spec.models) as opens:
        for word in ("eject", "default", "keep", "eject"):
            keeper.run(placed_by(word))
            assert keeper.objects() == before
        assert opens.take() == {}
    keeper.run(placed_by("keep"))
    keeper.free(**BOTH)
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(placed_by("eject"))
        assert opens.take() == {}, "it is still held when the prompt that ejects it begins"
        assert keeper.objects() == before
    keeper.free(**BOTH)
    assert alive(keeper) == []


@pytest.mark.parametrize("word", ["default", "eject"])
def test_a_kept_model_whose_file_changed_goes_when_its_successor_comes(keeper: Keeper, altered: Any, word: str) -> None:
    keeper.run({**loaded_by("keep"), "other": node("VAELoader", vae_name="toy_wan_vae.safetensors")}, client_id="one")
    old = {number for _, number, _ in alive(keeper)}
    altered("vae/toy_taef1.safetensors")
    keeper.run(loaded_by(word), client_id="two")
    assert [kind for kind, _, _ in alive(keeper)] == ["TAESD"]
    assert not old & {number for _, number, _ in alive(keeper)}
