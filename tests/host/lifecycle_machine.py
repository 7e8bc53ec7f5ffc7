"""A state machine: `keep_loaded` choices, the panel, frees, changed files, workflows and clients in random order.

The real server is compared with a small model of what the docs promise.

    MULTIGPU_TEST_MINUTES=30 python -m pytest -s tests/host/test_lifecycle_machine.py

That model is written from docs/lifecycle.md and the decision table alone. It knows how ComfyUI's caches behave (until
an entry is dropped, they return what a node with the same inputs has made, even if the file has changed) and nothing
about how the pack works.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from safetensors.torch import load_file, save_file

from devtools.client import Workflow
from tests.host.lifecycle import FILES, Keeper
from tests.host.workflows import node

WORDS = ("default", "keep", "eject")
PANEL = ("panel", "")
"""Who chooses in the panel, as a node does in a workflow."""
COUNTER = itertools.count(1)

CACHES = {"usual": (), "classic": ("--cache-classic",), "lru": ("--cache-lru", "500"), "none": ("--cache-none",)}
"""The flags of ComfyUI's caches. `usual` and `classic` remember the last prompt, `lru` all of them, `none` nothing."""


def ours(name: str, word: str) -> Workflow:
    """Our own loader, which has the widget."""
    made = node("VAELoaderDisTorch2MultiGPU", vae_name=name, compute_device="cpu", virtual_vram_gb=0.0,
                donor_device="cpu", keep_loaded=word)  # fmt: skip
    return {f"{name} out": made}


def placed(loader: str) -> Callable[[str, str], Workflow]:
    """A loader with a place node, which is listed first."""

    def make(name: str, word: str) -> Workflow:
        place = node("MultiGPUPlaceVAE", vae=[f"{name} in", 0], keep_loaded=word)
        return {f"{name} out": place, f"{name} in": node(loader, vae_name=name)}

    return make


def plain(name: str, word: str) -> Workflow:
    """A loader without the widget and without a place node: nothing is chosen for its model."""
    return {f"{name} out": node("VAELoader", vae_name=name)}


KINDS = {
    "ours.safetensors": ours,
    "placed.safetensors": placed("VAELoader"),
    "unknown.safetensors": placed("TestLoadVAE"),
    "plain.safetensors": plain,
}


@dataclass(eq=False)
class Copy:
    """A model in memory: which version of which file, and what was chosen for it, by which node, in which prompt."""

    file: str
    version: int
    number: float
    """What the weights add up to."""
    loaded: bool = True
    said: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    for_one_more_prompt: bool = False
    object: int | None = None

    @property
    def standing(self) -> str:
        newest = max((prompt for prompt, _ in self.said.values()), default=0)
        words = {word for prompt, word in self.said.values() if prompt == newest}
        return "keep" if "keep" in words else "eject" if "eject" in words else "default"

    def __repr__(self) -> str:
        state = "loaded" if self.loaded else "in RAM"
        return f"<{self.file} version {self.version}, {self.standing}, {state}, {self.object}>"


class LifecycleMachine(RuleBasedStateMachine):
    def __init__(self, keeper: Keeper, cache: str) -> None:
        super().__init__()
        self.keeper, self.cache = keeper, cache
        self.folder: Path = keeper.server.spec.models / "vae"
        self.weights = load_file(keeper.server.spec.models / FILES["vae"])
        self.versions: dict[str, tuple[int, float]] = {}
        self.remembered: dict[tuple[str, str], Copy] = {}
        """The host's cache: node -> what it made."""
        self.copies: list[Copy] = []
        self.prompt = 0

    @initialize()
    def begin(self) -> None:
        for name in KINDS:
            self._write(name)
        self.keeper.forget()

    # -- what users do ------------------------------------------------------------------------------------------

    @rule(
        words=st.dictionaries(st.sampled_from(list(KINDS)), st.sampled_from(WORDS), min_size=1, max_size=3),
        source=st.sampled_from(["client a", "client b", "workflow x", "workflow y"]),
    )
    def run(self, words: dict[str, str], source: str) -> None:
        kind, name = source.split()
        who: dict[str, Any] = {"client_id": name if kind == "client" else "tab"}
        if kind == "workflow":
            who["extra_data"] = {"extra_pnginfo": {"workflow": {"id": name}}}
        workflow: Workflow = {}
        for file, word in words.items():
            workflow |= KINDS[file](file, word)
        outputs = [[f"{file} out", 0] for file in words]
        use = node("TestUse", seed=next(COUNTER), **dict(zip(("one", "two", "three"), outputs, strict=False)))
        self.keeper.run({**workflow, "use": use}, **who)
        self.keeper.wait_idle()
        self._ran(words, source)
        self._compare()

    @rule(unload=st.booleans(), cache=st.booleans())
    def free(self, unload: bool, cache: bool) -> None:
        self.keeper.free(unload_models=unload, free_memory=cache)
        if unload or cache:
            self._unloaded()
        if cache:
            self.remembered.clear()
        if unload or cache:
            self._drop_what_nobody_holds()
        self._compare()

    @rule(file=st.sampled_from(list(KINDS)), route=st.sampled_from(["pin", "unpin", "eject"]))
    def choose_in_the_panel(self, file: str, route: str) -> None:
        shown = {its["id"]: its for its in self.keeper.client.get("/multigpu/snapshot")["models"]}
        ids = self.keeper.client.get("/lifecycle/panel")["ids"]
        expected = [copy for copy in self.copies if copy.loaded or copy.standing == "keep" or copy.for_one_more_prompt]
        told = {copy: shown.pop(ids[str(copy.object)]) for copy in expected}
        assert not shown, f"too many in the snapshot: {shown}"
        for copy, its in told.items():
            assert (its["standing"], its["loaded"]) == (copy.standing, copy.loaded), copy
        for copy in [copy for copy in expected if copy.file == file]:
            self.keeper.client.post(f"/multigpu/{route}", {"model": told[copy]["id"]})
            self.keeper.wait_idle()
            copy.said.clear()
            if route == "eject" and not copy.loaded:
                copy.for_one_more_prompt = False
            if route == "pin":
                copy.said[PANEL] = self.prompt, "keep"
            if route == "eject" and copy.loaded:
                copy.said[PANEL] = self.prompt, "eject"
                self._unloaded()
                del copy.said[PANEL]
        self._drop_what_nobody_holds()
        self._compare()

    @rule(file=st.sampled_from(list(KINDS)), touch=st.booleans())
    def change_file(self, file: str, touch: bool) -> None:
        path = self.folder / file
        if touch:
            os.utime(path, ns=(os.stat(path).st_mtime_ns + 10**6,) * 2)
            version, number = self.versions[file]
            self.versions[file] = version + 1, number
        else:
            self._write(file)

    def _write(self, file: str) -> None:
        scale = 1 + next(COUNTER) / 1000
        changed = {key: value * scale for key, value in self.weights.items()}
        save_file(changed, self.folder / f"{file}.new")
        os.replace(self.folder / f"{file}.new", self.folder / file)
        number = float(sum((value.double().abs().sum() for value in changed.values()), torch.tensor(0.0)))
        self.versions[file] = self.versions.get(file, (0, 0.0))[0] + 1, number

    # -- what the docs promise ------------------------------------------------------------------------------------

    def _ran(self, words: dict[str, str], source: str) -> None:
        self.prompt += 1
        before, self.remembered = self.remembered, dict(self.remembered) if self.cache == "lru" else {}
        for file, word in words.items():
            copy = self._out(file, word, before)
            copy.loaded = True
            if KINDS[file] is not plain:
                copy.said.pop((source, file), None)
                if word != "default":
                    copy.said[source, file] = self.prompt, word
        if self.cache == "none":
            self.remembered = {}
        for copy in self.copies:
            copy.for_one_more_prompt = False
        self._drop_what_nobody_holds()

    def _out(self, file: str, word: str, before: dict[tuple[str, str], Copy]) -> Copy:
        """What the nodes of a file give in this prompt; the host remembers it."""
        if KINDS[file] in (ours, plain):
            node_out = file, "" if KINDS[file] is plain else word
            self.remembered[node_out] = before.get(node_out) or self._ran_loader(file, again=KINDS[file] is ours)
            return self.remembered[node_out]
        loader, place = (file, "loader"), (file, f"place, {word}")
        loaded = before.get(loader)
        copy = before.get(place) or loaded or self._ran_loader(file, again=False)
        self.remembered[place] = copy
        if loaded is not None or place not in before:
            self.remembered[loader] = loaded or copy
        return copy

    def _ran_loader(self, file: str, *, again: bool) -> Copy:
        """What a node whose output is not cached returns: the held model if it is still valid, or the file's contents.

        Without a cache nothing can be handed back, except by our own loaders, which search for themselves (`again`).
        """
        version, number = self.versions[file]
        for copy in self.copies:
            if copy.file == file and copy.version == version and (again or self.cache != "none"):
                return copy
        for copy in self.copies:  # never two copies: the old one is not kept any more
            if copy.file == file:
                copy.said.clear()
                copy.for_one_more_prompt = False
        self.copies.append(Copy(file, version, number))
        return self.copies[-1]

    def _unloaded(self) -> None:
        """The decision table."""
        loaded = [copy for copy in self.copies if copy.loaded]
        standings = {copy.standing for copy in loaded}
        for copy in self.copies:
            copy.for_one_more_prompt = copy.loaded and "eject" in standings and copy.standing == "default"
        for copy in loaded:
            stays = copy.standing == "keep" or copy.for_one_more_prompt
            copy.loaded = stays

    def _drop_what_nobody_holds(self) -> None:
        remembered = list(self.remembered.values())
        self.copies = [
            copy
            for copy in self.copies
            if copy.standing == "keep" or copy.for_one_more_prompt or any(copy is its for its in remembered)
        ]

    # -- what is so -----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        loaded = {row["model_id"] for row in self.keeper.models()}
        alive = {row[1]: row[2] for row in self.keeper.client.get("/lifecycle/alive")}
        seen = f"expected {self.copies}; alive are {alive}, loaded {loaded}"
        for copy in sorted(self.copies, key=lambda copy: copy.object is None):
            if copy.object is None:
                alike = [its for its, number in alive.items() if abs(number - copy.number) < 1e-4 * number]
                assert alike, f"{copy} is not there: {seen}"
                copy.object = alike[0]
            number = alive.pop(copy.object, None)
            assert number is not None, f"{copy} is gone: {seen}"
            assert abs(number - copy.number) < 1e-4 * number, f"{copy} has other weights: {seen}"
            assert copy.loaded == (copy.object in loaded), f"{copy} is not as it should be: {seen}"
        assert not alive, f"too many: {seen}"
