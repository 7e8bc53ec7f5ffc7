"""What is upstream of a node, and which nodes ask for the same."""

from __future__ import annotations

from typing import Any

import pytest

from multigpu.lifecycle.prompt import Prompt, Speaker, source_of


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def flux(strength: float = 0.8, keep: str = "keep", ids: str = "") -> dict[str, Any]:
    """Loader, LoRA, place node, and a sampler that also takes the loader's model."""
    loader, lora, place, sample = (ids + name for name in ("loader", "lora", "place", "sample"))
    return {
        loader: node("UNETLoader", name="flux.safetensors"),
        lora: node("Lora", model=[loader, 0], file="style.safetensors", strength=strength),
        place: node("Place", model=[lora, 0], keep_loaded=keep),
        sample: node("Sample", model=[place, 0], negative=[loader, 1], seed=3),
    }


PROMPT = Prompt(flux())


def test_upstream_is_a_node_and_all_it_depends_on() -> None:
    assert PROMPT.upstream("loader") == ["loader"]
    assert PROMPT.upstream("place") == ["place", "lora", "loader"]
    assert PROMPT.upstream("sample") == ["sample", "place", "loader", "lora"]
    assert PROMPT.upstream("not there") == []


def test_links_to_nodes_that_are_not_there_are_no_links() -> None:
    assert Prompt({"a": node("A", x=["gone", 0], y=["two", "words"], z=[1, 2])}).upstream("a") == ["a"]


def test_the_values_are_those_of_everything_that_has_gone_in() -> None:
    files = [inputs.get("name", inputs.get("file")) for inputs in PROMPT.values("place")]
    assert files == [None, "style.safetensors", "flux.safetensors"]


def test_what_a_node_has_added_counts_as_its_own() -> None:
    nodes = {"all": node("All in one", which=1), "all.0.1": node("UNETLoader", name="flux.safetensors")}
    prompt = Prompt(nodes, parents={"all.0.1": "all"})
    assert prompt.upstream("all") == ["all"]
    assert {"name": "flux.safetensors"} in list(prompt.values("all"))


def test_what_is_used_outside() -> None:
    assert set(PROMPT.used_outside("place")) == {"loader"}
    assert list(PROMPT.used_outside("sample")) == []
    assert set(PROMPT.used_outside("lora")) == {"loader"}


def test_nodes_that_ask_for_the_same_have_the_same_signature() -> None:
    other = Prompt(flux(ids="x"))
    assert other.signature("xplace") == PROMPT.signature("place")
    both = Prompt({**flux(), **flux(ids="x")})
    assert both.signature("xplace") == both.signature("place") == PROMPT.signature("place")


@pytest.mark.parametrize(
    "changed", [flux(strength=0.9), flux(keep="eject"), {**flux(), "loader": node("UNETLoader", name="other")}]
)
def test_any_difference_upstream_makes_another_signature(changed: dict[str, Any]) -> None:
    assert Prompt(changed).signature("place") != PROMPT.signature("place")


def test_which_output_is_linked_makes_a_difference() -> None:
    nodes = flux()
    nodes["place"]["inputs"]["model"] = ["lora", 1]
    assert Prompt(nodes).signature("place") != PROMPT.signature("place")


def test_two_loaders_or_one_make_a_difference() -> None:
    """Alike in all inputs, but one takes one model twice and the other two models."""
    two = {"a": node("L"), "b": node("L"), "m": node("Merge", one=["a", 0], two=["b", 0])}
    one = {"a": node("L"), "m": node("Merge", one=["a", 0], two=["a", 0])}
    assert Prompt(two).signature("m") != Prompt(one).signature("m")


def test_inputs_that_do_not_count() -> None:
    without = ("keep_loaded",)
    eject = Prompt(flux(keep="eject"))
    assert eject.signature("place", without) == PROMPT.signature("place", without)
    linked = flux()
    linked["place"]["inputs"]["keep_loaded"] = ["loader", 2]
    assert Prompt(linked).signature("sample", without) != PROMPT.signature("sample", without), "of the node itself only"


def test_where_a_prompt_comes_from() -> None:
    ui = {"client_id": "tab 1", "extra_pnginfo": {"workflow": {"id": "w-1", "nodes": []}}}
    assert source_of(ui) == source_of({**ui, "client_id": "tab 2"}) == "workflow w-1"
    assert source_of({"client_id": "script"}) == "client script"
    for odd in (
        {"extra_pnginfo": None},
        {"extra_pnginfo": {"workflow": 3}},
        {"extra_pnginfo": {"workflow": {"id": 4}}},
    ):
        assert source_of({**odd, "client_id": "c"}) == "client c"
    assert source_of({}) == "client None"
    assert Prompt({}, "workflow w-1").speaker("4") == Speaker("workflow w-1", "4")
