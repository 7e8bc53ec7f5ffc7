"""Patchers as packs write them, around a tiny MODEL: placed, they draw what they draw unplaced, or they are refused.

The packs are written here; the product knows none of them by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.engine import tiny
from tests.engine.studio import Studio


@pytest.fixture(scope="module")
def habits(loaded_host: str) -> dict[str, Any]:
    """Patcher classes by habit. Classes need the host, which is there only when a test runs."""
    from comfy.model_patcher import ModelPatcher

    class SetsTheClass(ModelPatcher):
        """Clones as the host does, in the host's own class, and sets the class at last."""

        def clone(self, *arguments: Any, **named: Any) -> Any:
            own, self.__class__ = self.__class__, ModelPatcher
            made = ModelPatcher.clone(self, *arguments, **named)
            self.__class__, made.__class__ = own, SetsTheClass
            return made

    class ForgetsAttachments(ModelPatcher):
        def clone(self, disable_dynamic: bool = False, model_override: Any = None) -> Any:
            made = super().clone(disable_dynamic=disable_dynamic, model_override=model_override)
            made.attachments, made.callbacks = {}, ModelPatcher(made.model, *tiny.devices()).callbacks
            return made

    class HasArguments(ModelPatcher):
        """Has arguments of its own, which its clones get, and tables of their own; `clone` has no parameters."""

        def __init__(self, model: Any, load: Any, offload: Any, *, flavour: str = "sweet") -> None:
            super().__init__(model, load, offload)
            self.flavour = flavour

        def clone(self) -> Any:  # type: ignore[override]
            made = HasArguments(self.model, self.load_device, self.offload_device, flavour=self.flavour)
            made.patches = {key: [*patches] for key, patches in self.patches.items()}
            made.patches_uuid, made.object_patches = self.patches_uuid, {**self.object_patches}
            made.model_options = copy.deepcopy(self.model_options)
            return made

    class IsCopied(ModelPatcher):
        """Clones are shallow copies: they share all dicts but those that nodes write to."""

        def clone(self, *_: Any, **__: Any) -> Any:
            made = copy.copy(self)
            made.patches = {key: [*patches] for key, patches in self.patches.items()}
            made.object_patches = {**self.object_patches}
            made.model_options = copy.deepcopy(self.model_options)
            return made

    class CopiesTheModel(ModelPatcher):
        """Each clone has weights of its own, but the tables of the patcher that it was made from."""

        def clone(self, *arguments: Any, **named: Any) -> Any:
            made, config = super().clone(*arguments, **named), self.model.model_config
            made.model = copy.deepcopy(made.model, {id(config): config})
            return made

    class ModelIsAProperty(ModelPatcher):
        @property
        def model(self) -> Any:
            return self.box[0]

        @model.setter
        def model(self, model: Any) -> None:
            self.box = [model]

    class AddsToLoading(ModelPatcher):
        """Does something after each load, which the result needs, and counts in its own way."""

        def load(self, *arguments: Any, **named: Any) -> None:
            super().load(*arguments, **named)
            self.model.diffusion_model.shift = 1.0

        def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
            self.model.diffusion_model.shift = 0.0
            return super().unpatch_model(device_to, unpatch_weights=unpatch_weights)

        def partially_load(self, device_to: Any, *arguments: Any, **named: Any) -> Any:
            return super().partially_load(device_to, *arguments, **named)

        def partially_unload(self, *arguments: Any, **named: Any) -> Any:
            return 0

        def detach(self, unpatch_all: bool = True) -> Any:
            return super().detach(unpatch_all)

        def model_size(self) -> int:
            return 1 << 40

        def loaded_size(self) -> int:
            return 0

    return {cls.__name__: cls for cls in ModelPatcher.__subclasses__() if cls.__module__ == __name__}


HABITS = (
    "SetsTheClass",
    "ForgetsAttachments",
    "IsCopied",
    "ModelIsAProperty",
    "AddsToLoading",
    # Unplaced, as on the CPU, patches of one clone of these stay in the weights of the next.
    *(pytest.param(name, marks=pytest.mark.accelerator) for name in ("HasArguments", "CopiesTheModel")),
)


def loaded_by(cls: Any) -> Any:
    """A model as the loader of a pack gives it, with a patcher of the pack's class."""
    model = tiny.flux()
    model.diffusion_model.shift = 0.0
    model.diffusion_model.final_layer.register_forward_pre_hook(
        lambda _module, given: (given[0] + model.diffusion_model.shift, *given[1:])
    )
    return cls(model, *tiny.devices())


def lora(model: Any, strength: float = 1.0) -> Any:
    """What a LoRA node does: clone, and add patches."""
    patched, random = model.clone(), torch.Generator().manual_seed(4)
    patches = {}
    for name, weight in model.model.named_parameters():
        if weight.dim() == 2 and "blocks" in name:
            patches[name] = ("diff", (torch.randn(weight.shape, generator=random) / 16,))
    assert patched.add_patches(patches, strength)
    return patched


def sampling(model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    return ModelSamplingFlux().patch(model, 2.5, 0.1, 2048, 2048)[0]


def draw(studio: Studio, model: Any) -> torch.Tensor:
    return studio.latent(model, studio.conditions(tiny.WIDTH, tiny.WIDTH))


def counted(studio: Studio, model: Any) -> None:
    """All bytes of a loaded model are where its plan says, and the host is told so."""
    if studio.simulated:
        assert studio.resting(model) == studio.planned(model)
        assert model.loaded_size() == model.model_size() < 1 << 30


def check(studio: Studio, model: Any, want: torch.Tensor) -> None:
    """`model` draws `want` with every byte at its home; again after it was unloaded."""
    for _ in range(2):
        assert torch.equal(draw(studio, model), want)
        counted(studio, model)
        studio.unload()


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_a_pack_keeps_plan_and_picture(studio: Studio, habits: dict[str, Any], habit: str) -> None:
    given = loaded_by(habits[habit])
    makers = {"bare": lambda model: model, "LoRA": lora, "both": lambda model: sampling(lora(model, 0.5))}
    unplaced, wants = {name: make(given) for name, make in makers.items()}, {}
    for name, model in unplaced.items():
        wants[name] = draw(studio, model)
        studio.unload()
    assert not torch.equal(wants["bare"], wants["LoRA"]) and not torch.equal(wants["LoRA"], wants["both"])
    placed = studio.place_component(given)
    assert isinstance(placed, type(given)) and type(placed).__name__ == habit
    assert not given.attachments and type(given) is habits[habit]
    made = {name: make(placed) for name, make in makers.items()}
    for name, model in made.items():
        check(studio, model, wants[name])
    made["LoRA, place"] = studio.place_component(unplaced["LoRA"])
    wants["LoRA, place"] = wants["LoRA"]
    for name in ("both", "bare", "LoRA", "bare", "LoRA, place", "both"):  # one after the other, without an unload
        assert torch.equal(draw(studio, made[name]), wants[name]), name
    check(studio, made["LoRA, place"], wants["LoRA"])
    assert torch.equal(draw(studio, given), wants["bare"]), "the unplaced patcher of the same model"


def test_a_copy_that_is_gone_takes_nothing_with_it(studio: Studio, habits: dict[str, Any]) -> None:
    """Copies share their dicts with the original; the last one of them keeps the model placed."""
    given = loaded_by(habits["IsCopied"])
    placed = studio.place_component(given)
    want = draw(studio, placed)
    for copied in (copy.copy, lambda model: model.clone()):
        last, placed = placed, copied(placed)
        assert torch.equal(draw(studio, placed), want)
        del placed
        studio.settle()
        check(studio, last, want)
        placed = copied(last)
        assert torch.equal(draw(studio, placed), want)
        del last
        studio.settle()
        counted(studio, placed)
        check(studio, placed, want)
    config = given.model.model_config  # the host's class of these cannot be copied
    check(studio, copy.deepcopy(placed, {id(config): config}), want)
    draw(studio, placed)
    check(studio, copy.deepcopy(placed, {id(config): config}), want)  # of a model whose modules are streamed
    assert torch.equal(draw(studio, given), want)


def test_a_clone_that_is_gone_and_did_not_know_its_parent_is_unloaded(studio: Studio, habits: dict[str, Any]) -> None:
    given = loaded_by(habits["HasArguments"])
    placed = studio.place_component(given)
    draw(studio, lora(placed))
    for _ in range(2):
        studio.settle()
        studio.unload()
        assert set(studio.resting(given)) == {"cpu"}
        if placed is not None:
            draw(studio, placed)
        placed = None


def test_an_object_around_a_patcher(studio: Studio) -> None:
    """No patcher by class: it passes everything on to one, which it holds under a name of its own."""
    from comfy.model_patcher import ModelPatcher

    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Clones(Around):
        def clone(self, *arguments: Any, **named: Any) -> Any:
            return Clones(self.inner.clone(*arguments, **named))

    for cls in (Around, Clones):
        given = cls(loaded_by(ModelPatcher))
        bare, patched = draw(studio, given), draw(studio, lora(given))
        studio.unload()
        placed = studio.place_component(given)
        assert type(placed) is cls and given.inner is not placed.inner
        check(studio, placed, bare)
        check(studio, lora(placed), patched)
        check(studio, studio.place_component(lora(given)), patched)
        assert torch.equal(draw(studio, given), bare)


def test_a_node_that_takes_the_plan_or_the_device_from_a_placed_model(
    studio: Studio, caplog: pytest.LogCaptureFixture
) -> None:
    from comfy.model_patcher import ModelPatcher

    from multigpu.errors import PlacementNotApplied

    given = loaded_by(ModelPatcher)
    want = draw(studio, given)
    placed = studio.place_component(given)
    if not studio.simulated:
        return
    other = placed.clone()
    other.attachments = {}
    with pytest.raises(
        PlacementNotApplied, match="^Flux was placed, but a later node has removed the plan .* ModelPatcher"
    ):
        draw(studio, other)
    check(studio, placed, want)
    other = placed.clone()
    other.load_device = torch.device(studio.accelerators[1])
    assert torch.equal(draw(studio, other), want)
    assert f"Flux was placed for another device than {other.load_device}" in caplog.text


class Blocks:
    """Blocks of a model that a pack has kept, to move them to the compute device for each use, and away again."""

    def __init__(self, model: Any) -> None:
        self.blocks = [*model.model.diffusion_model.double_blocks, *model.model.diffusion_model.single_blocks]
        self.device = model.load_device

    def swap_in_forwards(self) -> None:
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, _given: (module.to(self.device), None)[1])
            block.register_forward_hook(lambda module, _given, _result: (module.to("cpu"), None)[1])


def test_blocks_that_a_pack_moves_in_each_step(studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    """The picture is right. What the pack has moved is at its home after the next load, and a line tells of it."""
    from comfy.model_management import load_models_gpu
    from comfy.model_patcher import ModelPatcher

    given = loaded_by(ModelPatcher)
    want = draw(studio, given)
    placed = studio.place_component(given)
    Blocks(placed).swap_in_forwards()
    for _ in range(2):
        assert torch.equal(draw(studio, placed), want)
        caplog.clear()
        load_models_gpu([placed])
        counted(studio, placed)
        if studio.simulated:
            assert "has moved weights of Flux" in caplog.text


@pytest.mark.accelerator
def test_a_patcher_that_loads_in_its_own_way_is_refused_when_it_is_loaded(studio: Studio) -> None:
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import CallbacksMP

    from multigpu.errors import PlacementNotApplied

    class Alone(ModelPatcher):
        def load(self, device_to: Any = None, *_: Any, **__: Any) -> None:
            self.model.to(device_to)

    class Past(ModelPatcher):
        def load(self, *arguments: Any, **named: Any) -> None:
            ModelPatcher.load(self, *arguments, **named)

    class Moves(ModelPatcher):
        def load(self, device_to: Any = None, *arguments: Any, **named: Any) -> None:
            super().load(device_to, *arguments, **named)
            self.model.diffusion_model.single_blocks.to(device_to)

    class AllAtOnce(ModelPatcher):
        def partially_load(self, device_to: Any, *_: Any, **__: Any) -> Any:
            self.model.to(device_to)
            return 0

    class Swaps(ModelPatcher):
        """With the callback of a node that swaps blocks when a model is loaded: the blocks that stay on the device."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.add_callback_with_key(
                CallbacksMP.ON_LOAD, "swap", lambda patcher, *_: patcher.model.diffusion_model.double_blocks.to("cpu")
            )

    for cls in (Alone, Past, Moves, AllAtOnce, Swaps):
        given = loaded_by(cls)
        placed = studio.place_component(given, f"{studio.accelerators[0]},40%;cpu,*")
        why = "has moved the weights of diffusion_model" if cls in (Moves, Swaps) else "does not use ComfyUI's"
        match = f"^Flux was placed, but its {cls.__name__} .* did not load it by the plan: .*{why}.*; remove the place"
        for _ in range(2):
            with pytest.raises(PlacementNotApplied, match=match):
                draw(studio, placed)
            assert set(studio.resting(given)) == {"cpu"}, "and nothing of it is left on a device"


def test_what_looks_like_a_patcher_is_refused(studio: Studio) -> None:
    from comfy.model_patcher import ModelPatcher

    class Lookalike:
        """Has all that a patcher has, and clones that have it, too."""

        def __init__(self, functions: Any) -> None:
            self.functions = functions

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["functions"](name)

        def clone(self, *_: Any, **__: Any) -> Any:
            return Lookalike(self.functions)

    inner = loaded_by(ModelPatcher)
    given = Lookalike(lambda name: getattr(inner, name))
    if studio.simulated:
        with pytest.raises(
            ValueError, match=r"^a Lookalike cannot be placed: it is not one of .* remove the place node"
        ):
            studio.place_component(given)
    assert inner.attachments == {} and type(inner) is ModelPatcher


@pytest.mark.accelerator
def test_another_device_for_a_patcher_that_always_clones_its_model(studio: Studio, habits: dict[str, Any]) -> None:
    for name in ("HasArguments", "IsCopied"):
        given = loaded_by(habits[name])
        want = draw(studio, given)
        with pytest.raises(ValueError, match=f"^a {name} cannot compute on another device than .*:0.*; choose .*:0 as"):
            studio.place_component(given, compute=studio.accelerators[1])
        assert str(given.load_device) == studio.accelerators[0] and torch.equal(draw(studio, given), want)
    given = loaded_by(habits["ForgetsAttachments"])
    want = draw(studio, given)
    there = studio.place_component(given, compute=studio.accelerators[1])
    check(studio, there, want)
    check(studio, lora(there), draw(studio, lora(given)))


@pytest.mark.accelerator
def test_a_model_that_a_pack_has_changed_is_copied_to_another_device_not_read_again(studio: Studio) -> None:
    """The host knows the file of the model, but not what the pack has done to the model since."""
    from comfy.model_patcher import ModelPatcher

    class Doubled(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, given: Any) -> Any:
            return self.inner(given) * 2

    def read(disable_dynamic: bool = False) -> Any:
        model = loaded_by(ModelPatcher)
        model.cached_patcher_init = (read, ())
        return model

    given = read()
    plain = draw(studio, given)
    unchanged = studio.place_component(given, compute=studio.accelerators[1])
    check(studio, unchanged, plain)
    assert unchanged.cached_patcher_init is not None
    given.model.diffusion_model.img_in = Doubled(given.model.diffusion_model.img_in)
    want = draw(studio, given)
    assert not torch.equal(want, plain)
    check(studio, studio.place_component(given.clone(), compute=studio.accelerators[1]), want)


def test_a_pack_s_dynamic_patcher_is_refused(studio: Studio) -> None:
    """DynamicVRAM: the host makes a static clone, but in its own class, without what the pack's class does."""
    from comfy.model_patcher import ModelPatcher

    from multigpu.errors import HostError
    from multigpu.host.engine.static_clone import static_clone

    class Dynamic(ModelPatcher):
        def is_dynamic(self) -> bool:
            return True

    given = loaded_by(Dynamic)
    given.cached_patcher_init = (lambda **_: loaded_by(ModelPatcher), ())
    with pytest.raises(
        HostError, match=r"^this Flux has a patcher of its pack's own class Dynamic .* --disable-dynamic"
    ):
        static_clone(given)
