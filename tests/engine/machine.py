"""A state machine: everything that can be done to a model, in random order, compared with the stock result.

    MULTIGPU_TEST_MINUTES=30 SIMDEV=cuda python -m pytest -s tests/engine/test_machine.py

Every patcher knows its recipe: the contents of the file it came from, and what was put on top. What a recipe draws and
saves is taken from unplaced patchers of models that nothing else has ever touched; all others have to give the same,
bit for bit, wherever their weights rest and whoever has loaded the model before. Bytes are counted after every step.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, precondition, rule
from safetensors.torch import load_file, save_file

from tests.engine.conftest import FOREMOST, HOST_TABLES
from tests.engine.studio import Studio
from tests.engine.test_quantised import quantised_file

SLACK = 1 << 20
"""Bytes that alignment may cost on a device."""

Recipe = tuple[Any, ...]
"""("file", version), ("lora", recipe, strength), ("other", recipe, strength) or ("merge", recipe, recipe, share)."""


@dataclass(eq=False)
class Item:
    """A patcher, what it must draw, and the model file it came from."""

    patcher: Any
    recipe: Recipe


class Workshop:
    """Makes what recipes say, and knows what they draw. Lives longer than one example."""

    def __init__(self, studio: Studio, folder: Path, *, steps: int = 1, quantised: bool = False) -> None:
        self.studio, self.folder, self.steps, self.quantised = studio, folder, steps, quantised
        self._drawn: dict[Recipe, torch.Tensor] = {}
        self._saved: dict[Recipe, dict[str, torch.Tensor]] = {}
        source = load_file(studio.models / "diffusion_models" / "toy_flux.safetensors")
        for version in range(2):
            times = 1 - 0.25 * version
            if quantised:
                quantised_file(studio, "float8_e4m3fn", self.file(version), times)
            else:
                save_file({key: value * times for key, value in source.items()}, self.file(version))

    def file(self, version: int) -> Path:
        """What the model file holds in one of its versions. All have the same size."""
        return self.folder / f"version-{version}.safetensors"

    def load(self, file: Path) -> Any:
        import comfy.sd

        return comfy.sd.load_diffusion_model(str(file))

    def on_top(self, kind: str, patcher: Any, strength: float) -> Any:
        """With the LoRA, or with patches of another kind on a few weights."""
        if kind == "lora":
            return self.studio.lora(patcher, strength)
        clone = patcher.clone()
        weights = clone.model_state_dict()
        keys = ["diffusion_model.single_blocks.1.linear1.weight", "diffusion_model.double_blocks.0.img_mlp.0.bias",
                "diffusion_model.img_in.weight"]  # fmt: skip
        noise = {key: torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(4)) for key in keys}
        clone.add_patches({key: ("diff", (change,)) for key, change in noise.items()}, strength)
        return clone

    def merged(self, one: Any, two: Any, share: float) -> Any:
        from comfy_extras.nodes_model_merging import ModelMergeSimple

        return ModelMergeSimple().merge(one, two, share)[0]

    def make(self, recipe: Recipe) -> Any:
        """An unplaced patcher of models of its own."""
        kind, *rest = recipe
        if kind == "file":
            return self.load(self.file(rest[0]))
        if kind == "merge":
            return self.merged(self.make(rest[0]), self.make(rest[1]), rest[2])
        return self.on_top(kind, self.make(rest[0]), rest[1])

    def draw(self, patcher: Any) -> torch.Tensor:
        return self.studio.latent(patcher, steps=self.steps)

    def save(self, patcher: Any) -> dict[str, torch.Tensor]:
        import comfy.sd

        file = self.folder / "saved.safetensors"
        comfy.sd.save_checkpoint(str(file), patcher)
        return load_file(file)

    def drawn(self, recipe: Recipe) -> torch.Tensor:
        if recipe not in self._drawn:
            self._drawn[recipe] = self.draw(self.make(recipe))
            self.studio.unload()
        return self._drawn[recipe]

    def saved(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        if recipe not in self._saved:
            self._saved[recipe] = self.save(self.make(recipe))
            self.studio.unload()
        return self._saved[recipe]


class Stumble(Exception):
    """What a block raises."""


def _stumble(*_: Any) -> None:
    raise Stumble


class EngineMachine(RuleBasedStateMachine):
    items = Bundle("items")

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        self.workshop, self.studio = workshop, workshop.studio
        self.file = workshop.folder / "model.safetensors"
        self.version = 0
        self.all: list[Item] = []
        self.tampered: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models whose file was changed in place since they were loaded: their originals may be out of reach."""

    # -- making -------------------------------------------------------------------------------------------------

    @initialize(target=items, strength=st.sampled_from([0.3, 0.8]))
    def begin(self, strength: float) -> Any:
        """A model, with a LoRA, and both of them placed: most mistakes need these."""
        self._write(0)
        plain = self._new(self.workshop.load(self.file), ("file", 0))
        with_lora = self.lora(plain, "lora", strength)
        return multiple(plain, with_lora, self.place(plain, 0), self.place(with_lora, 0))

    @rule(target=items, item=items, copy=st.booleans())
    def load(self, item: Item, copy: bool) -> Item:
        """From the file; or as the host makes a copy for another device, for which it reads the file again, too."""
        if len({id(item.patcher.model) for item in self.all}) > 3:
            return self._new(item.patcher, item.recipe)
        if not copy or not self.studio.simulated:
            return self._new(self.workshop.load(self.file), ("file", self.version))
        device = torch.device(self.studio.accelerators[1])
        copied = item.patcher.deepclone_multigpu(new_load_device=device)
        return self._new(copied, _with_base(item.recipe, self.version))

    @rule(target=items, item=items, how=st.integers(0, 4), fills=st.booleans())
    def place(self, item: Item, how: int, fills: bool = False) -> Item:
        requests = [self.studio.spread, "cpu,*"]
        if self.studio.simulated:
            zero, one, _ = self.studio.accelerators
            requests += [f"{one},60%;cpu,*", f"{zero},50%;cpu,*"]
            requests += [f"{zero},30%;cpu,10%;disk,*"] if self.studio.states.in_file(item.patcher) else []
        return self._new(self.studio.place(item.patcher, requests[how % len(requests)], fills=fills), item.recipe)

    @rule(target=items, item=items, kind=st.sampled_from(["lora", "other"]), strength=st.sampled_from([0.3, 0.8]))
    def lora(self, item: Item, kind: str, strength: float) -> Item:
        return self._new(self.workshop.on_top(kind, item.patcher, strength), (kind, item.recipe, strength))

    @precondition(lambda self: not self.workshop.quantised)
    @rule(target=items, one=items, two=items)
    def merge(self, one: Item, two: Item) -> Item:
        merged = self._or_told(one, two, do=lambda: self.workshop.merged(one.patcher, two.patcher, 0.5))
        if merged is None:
            return self._new(one.patcher, one.recipe)
        return self._new(merged, ("merge", one.recipe, two.recipe, 0.5))

    @rule(target=items, item=consumes(items))
    def succeed(self, item: Item) -> Item:
        """A clone with the same patches takes the place of a patcher, as when a node on top of it changes."""
        clone = self._new(item.patcher.clone(), item.recipe)
        self.drop(item)
        return clone

    @rule(item=consumes(items))
    def drop(self, item: Item) -> None:
        self.all.remove(item)
        item.patcher = None

    # -- using --------------------------------------------------------------------------------------------------

    @rule(item=items)
    def draw(self, item: Item) -> None:
        expected = self.workshop.drawn(item.recipe)
        drawn = self._or_told(item, do=lambda: self.workshop.draw(item.patcher))
        assert drawn is None or torch.equal(drawn, expected), f"{item.recipe} draws something else"
        self._count()

    @rule(item=items, where=st.integers(0, 5))
    def break_off(self, item: Item, where: int) -> None:
        """A step that ends with an error in a block. What has not come yet still comes, or stays in the file."""
        network = item.patcher.model.diffusion_model
        blocks = [*network.double_blocks, *network.single_blocks]
        hook = blocks[where % len(blocks)].register_forward_pre_hook(_stumble)
        try:
            with suppress(Stumble):
                self._or_told(item, do=lambda: self.workshop.draw(item.patcher))
                assert item.patcher.model in self.tampered, "the block did not run"
        finally:
            hook.remove()

    @rule(one=items, two=items)
    def draw_two(self, one: Item, two: Item) -> None:
        self.draw(one)
        self.draw(two)

    @rule(one=items, two=items)
    def draw_one_free_and_draw(self, one: Item, two: Item) -> None:
        self.draw(one)
        self.free("all")
        self.draw(two)

    @rule(item=items)
    def save(self, item: Item) -> None:
        expected = self.workshop.saved(item.recipe)
        saved = self._or_told(item, do=lambda: self.workshop.save(item.patcher))
        if saved is not None:
            differ = [key for key, value in expected.items() if not _same(saved[key], value)]
            assert saved.keys() == expected.keys() and not differ, f"{item.recipe} is saved with other {differ[:3]}"
        self._count()

    @rule(how=st.sampled_from(["all", "1", "10", "30"]))
    def free(self, how: str) -> None:
        """All models, or so many megabytes that the host needs for something else."""
        import comfy.model_management as memory

        self.studio.settle()
        if how == "all":
            self.studio.unload()
        else:
            device = memory.get_torch_device()
            memory.free_memory(memory.get_free_memory(device) + (int(how) << 20), device)
        self._count()

    @rule(how=st.sampled_from(["touched", "replaced", *([] if FOREMOST else ["overwritten"])]))
    def change_file(self, how: str) -> None:
        """Not overwritten where weights are pages of it: there the host's own models change with it, too."""
        if how == "touched":
            os.utime(self.file, ns=(os.stat(self.file).st_mtime_ns + 10**6,) * 2)
        elif how == "replaced":
            shutil.copy(self.workshop.file(1 - self.version), self.file.with_suffix(".new"))
            os.replace(self.file.with_suffix(".new"), self.file)
            self.version = 1 - self.version
            return
        else:
            self._write(1 - self.version)
        self.tampered.update(item.patcher.model for item in self.all)

    # -- checks -------------------------------------------------------------------------------------------------

    def _new(self, patcher: Any, recipe: Recipe) -> Item:
        self.all.append(Item(patcher, recipe))
        return self.all[-1]

    def _write(self, version: int) -> None:
        """Change the file in place, as copying over it does."""
        self.file.write_bytes(self.workshop.file(version).read_bytes())
        self.version = version

    def _or_told(self, *items: Item, do: Any) -> Any:
        """What `do` returns; None if it says that the file has changed, where that is so."""
        from multigpu.errors import HostError

        try:
            return do()
        except HostError as problem:
            tampered = any(item.patcher.model in self.tampered for item in self.all)
            assert "changed on disk" in str(problem) and tampered, problem
            return None

    def _count(self) -> None:
        """At the end of a prompt every loaded model rests where its plan says, and nothing else is on a device."""
        import comfy.model_management as memory

        self.studio.settle()
        expected: Counter[str] = Counter()
        for entry in memory.current_loaded_models:
            if entry.model is None:  # its patchers are gone; the host removes the entry when it looks at it next
                continue
            if self.studio.states.of(entry.model).residence.due.outstanding:
                return  # memory is taken for what has still to come
            resting = self.studio.proven(entry.model)
            expected.update(resting)
            plan = self.studio.states.of(entry.model).residence.plan
            if plan is not None:
                planned = Counter({str(home): count for home, count in plan.bytes_by_home().items() if count})
                found = Counter(resting)
                if self.workshop.quantised:  # the scales of weights in the file are in RAM
                    for counted in (planned, found):
                        counted["cpu"] += counted.pop("disk", 0)
                assert found == planned, f"{resting} where {planned} was planned"
                expected[str(plan.compute)] += plan.ring_bytes
        if not self.studio.simulated:
            return
        handed_out = {key: its for item in self.all for key, its in _handed_out(item.patcher).items()}
        for device, count in handed_out.values():
            expected[device] += count
        for device in self.studio.accelerators:
            used = self.studio.world.allocated(device)
            assert used <= expected[device] + HOST_TABLES + SLACK, f"{used} bytes on {device}, {expected[device]} known"
        if not memory.current_loaded_models:  # the host pins what it offloads, too
            assert self.studio.world.pinned_bytes() == 0, "pinned, and nothing is loaded"

    def teardown(self) -> None:
        for item in self.all:  # the bundle holds them until the next sequence
            item.patcher = None
        self.all.clear()
        self.tampered.clear()
        self.studio.settle()
        self.studio.unload()
        self._count()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """In every bit; torch does not compare values of 8 bits."""
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _with_base(recipe: Recipe, version: int) -> Recipe:
    """The recipe on top of another version of the file. In a merge only the first model is copied."""
    kind, *rest = recipe
    return ("file", version) if kind == "file" else (kind, _with_base(rest[0], version), *rest[1:])


def _handed_out(patcher: Any) -> dict[int, tuple[str, int]]:
    """The weights of other models that patches hold, those included that are in weights which cannot be restored."""
    kept = [getattr(original, "patches", ()) for original in patcher.backup.values()]
    return {
        tensor.data_ptr(): (str(tensor.device), tensor.nbytes)
        for patches in [*patcher.patches.values(), *kept]
        for patch in patches
        for tensor in _tensors(patch[1])
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
