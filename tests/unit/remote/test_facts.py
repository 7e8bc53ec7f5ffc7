"""What must be the same on two machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multigpu.errors import RemoteMismatch
from multigpu.remote.facts import Facts, FileFact, check, normal_name, ray_mismatch

HERE = Facts("this machine", {"ComfyUI": "0.30.0", "torch": "2.9.0+cpu"}, frozenset({"VAELoader"}),
             (FileFact("vae/sub/a.safetensors", 7, "beef"),))  # fmt: skip
THERE = replace(HERE, where="node-b", versions={"ComfyUI": "0.30.0", "torch": "2.9.0+cu128"})


def test_equal_machines_agree() -> None:
    check(HERE, THERE)
    check(HERE, replace(THERE, nodes=frozenset({"VAELoader", "Other"})))
    check(replace(HERE, files=(FileFact("vae/sub/a.safetensors", 7),)), THERE)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions": {"ComfyUI": "0.29.0", "torch": "2.9.0"}}, ["ComfyUI", "0.29.0", "0.30.0"]),
        ({"versions": {"ComfyUI": "0.30.0"}}, ["torch", "none", "2.9.0+cpu"]),
        ({"nodes": frozenset()}, ["VAELoader"]),
        ({"files": ()}, ["vae/sub/a.safetensors", "copy"]),
        ({"files": (FileFact("vae/sub/a.safetensors", 8, "beef"),)}, ["vae/sub/a.safetensors", "8", "7"]),
        ({"files": (FileFact("vae/sub/a.safetensors", 7, "dead"),)}, ["vae/sub/a.safetensors", "dead", "beef"]),
    ],
)
def test_a_difference_is_an_error_that_names_both_sides(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RemoteMismatch) as refused:
        check(HERE, replace(THERE, **changed))
    assert all(word in str(refused.value) for word in (*words, "node-b", "this machine"))


def test_many_differences_are_counted() -> None:
    with pytest.raises(RemoteMismatch, match="and 14 more"):
        check(replace(HERE, nodes=frozenset(map(str, range(20)))), THERE)


def test_facts_survive_being_sent() -> None:
    assert Facts.read(THERE.plain()) == THERE


@pytest.mark.parametrize("plain", [None, 3, {}, {**THERE.plain(), "files": [["a"]]}, {**THERE.plain(), "versions": 1}])
def test_facts_of_another_form_are_refused(plain: Any) -> None:
    with pytest.raises(RemoteMismatch, match="same version"):
        Facts.read(plain)


@pytest.mark.parametrize(
    ("ray", "python", "words"),
    [
        ("2.60.0", "3.11.2", ()),
        ("2.58.0", "3.11.9", ("its Ray is 2.58.0 and that of this machine 2.60.0; pip install ray==2.58.0 here",)),
        ("2.60.0", "3.12.1", ("its Python is 3.12.1 and that of this machine 3.11.9; run",)),
        ("2.58.0", "3.1.11", ("its Ray is 2.58.0", "its Python is 3.1.11")),
    ],
)
def test_ray_is_of_the_same_version_and_python_of_the_same_minor_version(
    ray: str, python: str, words: tuple[str, ...]
) -> None:
    told = ray_mismatch({"Ray": ray, "Python": python}, {"Ray": "2.60.0", "Python": "3.11.9"})
    assert bool(told) == bool(words) and all(word in told for word in words), told


def test_separators_of_every_system_are_the_same() -> None:
    assert normal_name("sub\\a.safetensors") == normal_name("sub/a.safetensors")
