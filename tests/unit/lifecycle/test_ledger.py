"""Records, anchors and handing back, with stand-ins for the host's patchers (real weak references, real files)."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from multigpu.lifecycle.ledger import Ledger, Ports, stamp


class Model:
    pass


@dataclass(eq=False)
class Patcher:
    model: Model
    parent: Patcher | None = None
    patches: list[str] = field(default_factory=list)

    def clone(self, *patches: str) -> Patcher:
        return Patcher(self.model, self, [*self.patches, *patches])


@dataclass(eq=False)
class Clip:
    patcher: Patcher


class Empty:
    """A component without a model."""


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(
        Ports(
            patcher_of=lambda value: value if isinstance(value, Patcher) else getattr(value, "patcher", None),
            model_of=lambda patcher: patcher.model,
            is_root=lambda patcher: patcher.parent is None or patcher.parent.model is not patcher.model,
            is_clean=lambda patcher: not patcher.patches,
            is_empty=lambda value: isinstance(value, Empty),
        )
    )


def gone(*references: weakref.ref[Any]) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


def test_the_parts_of_a_checkpoint_are_together_and_one_may_be_empty(ledger: Ledger) -> None:
    model, vae, other = Patcher(Model()), Patcher(Model()), Patcher(Model())
    assert ledger.remember("checkpoint", [[model], [None], [vae]], ())
    assert ledger.remember("other", [[other], [None], [Empty()]], ())
    assert not ledger.remember("unknown", [[other], [object()]], ())
    assert ledger.together(model.model, vae.model) and not ledger.together(model.model, other.model)
    gc.collect()
    found = ledger.hand_back("other")
    assert found is not None and found[0] == [other] and isinstance(found[2][0], Empty), "it is kept with the record"


def test_a_record_alone_holds_nothing(ledger: Ledger) -> None:
    patcher = Patcher(Model())
    assert ledger.remember("loader", [[patcher]], ())
    assert ledger.hand_back("loader") == [[patcher]]
    seen = weakref.ref(patcher.model)
    del patcher
    assert gone(seen)
    assert ledger.hand_back("loader") is None
    assert not ledger.knows("loader")


def test_a_retained_model_is_handed_back(ledger: Ledger) -> None:
    patcher = Patcher(Model())
    ledger.remember("loader", [[patcher]], ())
    ledger.settle([patcher.model])
    number = id(patcher)
    del patcher
    gc.collect()
    outputs = ledger.hand_back("loader")
    assert outputs is not None
    assert id(outputs[0][0]) == number
    assert ledger.retained_models() == [outputs[0][0].model]


def test_settling_on_nothing_lets_go(ledger: Ledger) -> None:
    patcher = Patcher(Model())
    ledger.remember("loader", [[patcher]], ())
    ledger.settle([patcher.model])
    seen = weakref.ref(patcher.model)
    del patcher
    ledger.settle([])
    assert gone(seen)


def test_what_a_prompt_put_on_top_is_not_held(ledger: Ledger) -> None:
    loaded = Patcher(Model())
    with_lora = loaded.clone("lora")
    ledger.remember("loader", [[loaded]], ())
    ledger.remember("lora", [[with_lora]], ())
    ledger.settle([loaded.model])
    seen = weakref.ref(with_lora)
    del with_lora
    assert gone(seen)
    assert ledger.hand_back("loader") == [[loaded]]
    assert ledger.hand_back("lora") is None
    ledger.settle([loaded.model])
    assert ledger.retained_models() == [loaded.model], "asking for the LoRA did not cost the model its place"


def test_the_anchored_clone_is_handed_back_if_it_is_clean(ledger: Ledger) -> None:
    loaded = Patcher(Model())
    placed, with_lora = loaded.clone(), loaded.clone("lora")
    ledger.remember("place", [[placed]], ())
    ledger.remember("place a patched one", [[with_lora]], ())
    ledger.anchor(placed, "keep_loaded", pinned=True)
    ledger.settle([loaded.model])
    numbers = id(placed), id(with_lora)
    del placed, with_lora
    gc.collect()
    outputs = ledger.hand_back("place")
    assert outputs is not None and id(outputs[0][0]) == numbers[0]
    assert ledger.hand_back("place a patched one") is None


def test_a_record_with_a_model_that_leaves_is_not_held(ledger: Ledger) -> None:
    """A checkpoint of which one part is ejected cannot be handed back; the others go when it is loaded again."""
    model, clip = Patcher(Model()), Clip(Patcher(Model()))
    ledger.remember("checkpoint", [[model], [clip]], ())
    ledger.anchor(clip.patcher, "keep_loaded", pinned=True)
    ledger.settle([clip.patcher.model])
    ejected, kept = weakref.ref(model.model), weakref.ref(clip.patcher.model)
    del model, clip
    gc.collect()
    assert ejected() is None
    assert kept() is not None
    assert ledger.hand_back("checkpoint") is None
    assert gone(kept), "the checkpoint is about to be loaded again: no second copy"


def test_changed_files_are_loaded_anew(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    patcher = Patcher(Model())
    ledger.remember("loader", [[patcher]], [stamp(str(file))])
    ledger.anchor(patcher, "keep_loaded", pinned=True)
    ledger.settle([patcher.model])
    assert ledger.hand_back("loader") == [[patcher]]
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    seen = weakref.ref(patcher.model)
    del patcher
    assert ledger.hand_back("loader") is None
    assert gone(seen)


def test_a_file_that_is_gone_counts_as_changed(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    patcher = Patcher(Model())
    ledger.remember("loader", [[patcher]], [stamp(str(file))])
    file.unlink()
    assert ledger.hand_back("loader") is None


def test_a_successor_takes_the_place_of_the_old(ledger: Ledger) -> None:
    old, new = Patcher(Model()), Patcher(Model())
    ledger.remember("loader", [[old]], ())
    ledger.anchor(old, "keep_loaded", pinned=True)
    ledger.remember("loader", [[new]], ())
    seen = weakref.ref(old.model)
    del old
    assert gone(seen)
    assert ledger.hand_back("loader") == [[new]]


def test_the_same_model_again_keeps_its_anchor(ledger: Ledger) -> None:
    patcher = Patcher(Model())
    ledger.remember("loader", [[patcher]], ())
    ledger.anchor(patcher, "keep_loaded", pinned=True)
    ledger.remember("loader", [[patcher]], ())
    assert ledger.anchored(patcher.model)


@pytest.mark.parametrize("outputs", [[], [[]], [[object()]], [["text"]], [[None]]])
def test_only_models_are_recorded(ledger: Ledger, outputs: list[list[Any]]) -> None:
    assert not ledger.remember("key", outputs, ())
    assert ledger.hand_back("key") is None


def test_models_and_tensors_together_are_not_recorded(ledger: Ledger) -> None:
    assert not ledger.remember("key", [[Patcher(Model())], [{"samples": 1}]], ())


def test_plain_values_beside_models_are_kept_as_they_are(ledger: Ledger) -> None:
    patcher = Patcher(Model())
    assert ledger.remember("checkpoint without vae", [[patcher], [None], ["name"]], ())
    assert ledger.hand_back("checkpoint without vae") == [[patcher], [None], ["name"]]


def test_what_is_held_for_a_cycle_goes_with_it(ledger: Ledger) -> None:
    pinned, recorded, alone = (Patcher(Model()) for _ in range(3))
    ledger.remember("loader", [[recorded]], ())
    ledger.anchor(pinned, "keep_loaded", pinned=True)
    ledger.anchor(recorded, "this cycle", pinned=False)
    ledger.anchor(alone, "this cycle", pinned=False)
    ledger.settle([pinned.model, recorded.model])
    assert ledger.release_cycle(unless_recorded=True) == [alone]
    assert {id(anchor.patcher) for anchor in ledger.anchors()} == {id(pinned), id(recorded)}
    assert ledger.release_cycle(unless_recorded=False) == [recorded]
    assert [anchor.patcher for anchor in ledger.anchors()] == [pinned]


def test_clear_says_how_many_and_leaves_nothing(ledger: Ledger) -> None:
    one, two = Patcher(Model()), Patcher(Model())
    ledger.remember("loader", [[one]], ())
    ledger.settle([one.model])
    ledger.anchor(two, "keep_loaded", pinned=True)
    assert ledger.clear() == 2
    assert ledger.retained_models() == [] and ledger.anchors() == []
    seen = weakref.ref(one.model), weakref.ref(two.model)
    del one, two
    assert gone(*seen)


def test_records_of_dead_models_are_dropped(ledger: Ledger) -> None:
    for number in range(1000):
        ledger.remember(f"loader {number}", [[Patcher(Model())]], ())
        ledger.settle([])
    assert sum(ledger.knows(f"loader {number}") for number in range(1000)) <= 1


def test_a_node_that_runs_after_a_file_has_changed_does_not_renew_its_stamp(ledger: Ledger, tmp_path: Path) -> None:
    """It runs on the model of the old file, because the loader before it is cached."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    loaded = Patcher(Model())
    ledger.remember("loader", [[loaded]], [stamp(str(file))])
    old = file.stat()
    file.write_bytes(b"22")
    placed = loaded.clone()
    ledger.remember("place", [[placed]], [stamp(str(file))])
    assert ledger.hand_back("place") is None
    ledger.remember("place", [[placed]], [stamp(str(file))])
    file.write_bytes(b"1")
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert ledger.hand_back("place") is None, "nobody knows any more which of the two it is"
