"""Text encoders, VAEs, ControlNets and CLIP vision models as packs write them: placed behind their loaders, or refused.

Each gives the same placed as unplaced, with its bytes at their homes. The packs are written here; the product knows
none of them by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine import tiny
from tests.engine.pack import patcher_of, small_vision
from tests.engine.studio import Studio

REFUSED = r"cannot be placed: .*; remove the place node, or "


def stock_patcher(model: Any) -> Any:
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(model, *tiny.devices())


def spread(studio: Studio, share: str = "1%") -> str:
    """A request for two devices and RAM. Nine tenths of a tiny text encoder are its embeddings, which cannot move."""
    return f"{studio.accelerators[0]},{share};{studio.accelerators[1]},{share};cpu,*" if studio.simulated else "cpu,*"


def check(
    studio: Studio, given: Any, use: Callable[[Any], torch.Tensor], elsewhere: bool = True, share: str = "1%"
) -> Any:
    """Place a component: it gives the same, also after it was unloaded. So does `given`, whose class it keeps.

    With `elsewhere` it computes on another device, too. Returns the placed component.
    """
    before = dict(getattr(given, "__dict__", {}))
    want = use(given)
    placed = studio.place_component(given, spread(studio, share))
    assert type(placed) is type(given) and placed is not given
    for _ in range(2):
        assert torch.equal(use(placed), want)
        counted(studio, placed)
        studio.unload()
    assert torch.equal(use(given), want)
    held = {name: held for name, held in getattr(given, "__dict__", {}).items() if name in before}
    assert all(held[name] is before[name] for name in before if not isinstance(before[name], bool)), "it was changed"
    if elsewhere and studio.simulated:
        there = studio.place_component(given, f"{studio.accelerators[1]},{share};cpu,*", studio.accelerators[1])
        assert torch.equal(use(there), want)
        assert studio.resting(patcher_of(there)).keys() == {studio.accelerators[1], "cpu"}
        assert torch.equal(use(given), want)
    return placed


def counted(studio: Studio, component: Any) -> None:
    """The bytes rest where the plan says, on more than one device."""
    if studio.simulated:
        patcher = patcher_of(component)
        resting, planned = studio.resting(patcher), studio.planned(patcher)
        assert len(planned) > 1 and resting == planned


# -- CLIP -----------------------------------------------------------------------------------------------------------


def clip_with(patcher_class: Any, clip_class: Any = None) -> Any:
    import comfy.sd

    clip = comfy.sd.CLIP(no_init=True) if clip_class is None else clip_class()
    return tiny.as_clip(clip, patcher_class(tiny.text_model(), *tiny.devices()))


def encoded(clip: Any) -> torch.Tensor:
    return clip.encode_from_tokens(clip.tokenize("a house")).cpu()


def with_lora(clip: Any, strength: float = 1.0) -> Any:
    """What a LoRA node does to a text encoder."""
    patched, random = clip.clone(), torch.Generator().manual_seed(4)
    layers = {k: v for k, v in clip.cond_stage_model.named_parameters() if "layers" in k and v.dim() == 2}
    patches = {k: ("diff", (torch.randn(v.shape, generator=random) / 8,)) for k, v in layers.items()}
    assert patched.add_patches(patches, strength)
    return patched


def test_a_text_encoder_with_a_patcher_of_a_pack(studio: Studio) -> None:
    from comfy.model_patcher import ModelPatcher

    class SetsTheClass(ModelPatcher):
        def clone(self, *arguments: Any, **named: Any) -> Any:
            made = ModelPatcher.clone(self, *arguments, **named)
            made.__class__ = SetsTheClass
            return made

    class ForgetsAttachments(ModelPatcher):
        def clone(self, disable_dynamic: bool = False, **named: Any) -> Any:
            made = super().clone(disable_dynamic, **named)
            made.attachments = {}
            return made

    class MakesNewOnes(ModelPatcher):
        def clone(self, disable_dynamic: bool = False) -> Any:  # type: ignore[override]
            made = MakesNewOnes(self.model, self.load_device, self.offload_device)
            made.patches = {key: [*patches] for key, patches in self.patches.items()}
            made.patches_uuid, made.backup, made.parent = self.patches_uuid, self.backup, self
            return made

    for cls in (SetsTheClass, ForgetsAttachments, MakesNewOnes):
        given = clip_with(cls)
        placed = check(studio, given, encoded, elsewhere=cls is not MakesNewOnes)
        assert isinstance(placed.patcher, cls)
        bare, strong = encoded(given), encoded(with_lora(given))
        assert not torch.equal(bare, strong)
        studio.unload()
        before, after = studio.place_component(with_lora(given), spread(studio)), with_lora(placed)
        for clip, want in ((before, strong), (after, strong), (placed, bare), (after, strong), (given, bare)):
            assert torch.equal(encoded(clip), want)
            if clip is not given:
                counted(studio, clip)


def test_text_encoders_of_a_pack_s_own_class(studio: Studio) -> None:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher

    class Shouts(comfy.sd.CLIP):
        """Encodes in its own way, and has the host's `clone`, which gives a plain CLIP."""

        def __init__(self) -> None:
            super().__init__(no_init=True)

        def encode_from_tokens(self, tokens: Any, *arguments: Any, **named: Any) -> Any:
            return super().encode_from_tokens(tokens, *arguments, **named) * 2

    class Own:
        """No CLIP of the host: a patcher, a model, and parts of it under other names."""

        def tokenize(self, text: str) -> Any:
            return self.tokenizer.tokenize_with_weights(text)

        def encode_from_tokens(self, tokens: Any) -> torch.Tensor:
            import comfy.model_management as memory

            memory.load_models_gpu([self.patcher])
            self.encoder.set_clip_options({"execution_device": self.patcher.load_device})
            return self.encoder.encode_token_weights(tokens["l"])[0]

        def clone(self) -> Any:
            new = copy.copy(self)
            new.patcher = self.patcher.clone()
            return new

        def add_patches(self, *arguments: Any) -> Any:
            return self.patcher.add_patches(*arguments)

    for cls in (Shouts, Own):
        given = clip_with(ModelPatcher, cls)
        given.encoder = given.cond_stage_model.clip_l
        placed = check(studio, given, encoded)
        assert placed.tokenizer_options is not given.tokenizer_options
        patched = studio.place_component(with_lora(given), spread(studio))
        assert torch.equal(encoded(with_lora(placed)), encoded(with_lora(given)))
        assert torch.equal(encoded(patched), encoded(with_lora(given)))


@pytest.mark.accelerator
def test_a_text_encoder_around_the_model_in_its_patcher(studio: Studio) -> None:
    """What computes is not the patcher's model but contains it, so it stays on the device that it was loaded for."""
    from comfy.model_patcher import ModelPatcher

    class Outer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    given = clip_with(ModelPatcher)
    given.cond_stage_model = Outer(given.cond_stage_model)
    check(studio, given, encoded, elsewhere=False)
    with pytest.raises(ValueError, match=f"^a CLIP {REFUSED}choose the compute device .* loaded for"):
        studio.place_component(given, compute=studio.accelerators[1])


# -- VAE ------------------------------------------------------------------------------------------------------------


def decoded(vae: Any) -> torch.Tensor:
    return vae.decode(torch.full((1, 16, 1, 1), 0.5)).cpu()


class OwnVAE:
    """A VAE of a pack: encodes and decodes by itself."""

    def __init__(self, vae: Any) -> None:
        self.first_stage_model = vae.first_stage_model
        self.patcher = stock_patcher(vae.first_stage_model)
        self.device = self.patcher.load_device

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        import comfy.model_management as memory

        memory.load_models_gpu([self.patcher])
        dtype = next(self.first_stage_model.parameters()).dtype
        return self.first_stage_model.decode(latent.to(self.device, dtype)).cpu()


def test_vaes_of_a_pack(studio: Studio) -> None:
    import comfy.sd

    class Inverts(comfy.sd.VAE):
        def decode(self, *arguments: Any, **named: Any) -> Any:
            return 1 - super().decode(*arguments, **named)

    class Lazy(OwnVAE):
        """Makes its patcher when it is asked for it, and its attributes are fixed."""

        def __init__(self, vae: Any) -> None:
            self.made: list[Any] = []
            super().__init__(vae)

        @property
        def patcher(self) -> Any:
            if self._patcher is None:
                self._patcher = stock_patcher(self.first_stage_model)
            return self._patcher

        @patcher.setter
        def patcher(self, patcher: Any) -> None:
            self._patcher = None

    class Module(torch.nn.Module):
        """A module with the model as its submodule."""

        __init__, decode = torch.nn.Module.__init__, OwnVAE.decode

    stock = studio.vae("toy_taef1.safetensors")
    inverts, module = copy.copy(stock), Module()
    inverts.__class__, inverts.patcher = Inverts, stock_patcher(stock.first_stage_model)
    OwnVAE.__init__(module, stock)  # type: ignore[arg-type]
    for given in (inverts, OwnVAE(stock), Lazy(stock), module):
        check(studio, given, decoded)
        studio.unload()


def test_vaes_without_a_patcher_of_their_own_are_refused(studio: Studio) -> None:
    @dataclass
    class NoPatcher:
        first_stage_model: Any
        patcher: Any = None

    class Anew(NoPatcher):
        @property
        def patcher(self) -> Any:
            return stock_patcher(self.first_stage_model)

        @patcher.setter
        def patcher(self, patcher: Any) -> None:
            pass

    class Itself(torch.nn.Module):
        def __init__(self, vae: Any) -> None:
            super().__init__()
            self.first_stage_model = vae.first_stage_model
            self.patcher = stock_patcher(self)

    class Several(NoPatcher):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.encoder, self.decoder = stock_patcher(model.taesd_encoder), stock_patcher(model.taesd_decoder)

    stock = studio.vae("toy_taef1.safetensors")
    model = stock.first_stage_model
    for given, why in (
        (NoPatcher(model), "it does not keep its weights in one of ComfyUI's model patchers"),
        (Anew(model), "it makes its patcher anew"),
        (Itself(stock), "it is itself the model in its patcher"),
        (Several(model), r"it keeps its weights in several of ComfyUI's model patchers \(encoder, decoder\)"),
    ):
        before = dict(vars(given))
        with pytest.raises(ValueError, match=f"^a {type(given).__name__} {REFUSED}") as refused:
            studio.place_component(given, spread(studio))
        assert refused.match(why)
        assert dict(vars(given)) == before


# -- CONTROL_NET ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controls(loaded_host: str) -> dict[str, Any]:
    """ControlNet classes by name."""
    from comfy.controlnet import ControlBase, ControlNet

    class Louder(ControlNet):
        """The host's ControlNet with more in `get_control`; `copy` keeps the class."""

        def __init__(self, model: Any) -> None:
            super().__init__(model, load_device=tiny.devices()[0])

        def get_control(self, *arguments: Any) -> Any:
            made = super().get_control(*arguments)
            return {key: [value * 2 for value in values] for key, values in made.items()}

        def copy(self) -> Any:
            new = Louder(None)
            new.control_model, new.control_model_wrapped = self.control_model, self.control_model_wrapped
            self.copy_to(new)
            return new

    class OtherNames(ControlBase):
        """Not the host's ControlNet: model and patcher have other names, the model is called with positions."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.net, self.net_patcher = model, stock_patcher(model)

        def inner(self) -> Any:
            return self.net

        def get_control(self, x: torch.Tensor, t: Any, cond: Any, batched: int, _options: Any) -> Any:
            previous = self.previous_controlnet
            before = None if previous is None else previous.get_control(x, t, cond, batched, _options)
            hint = self.cond_hint_original.to(x.device, x.dtype)
            return self.control_merge(self.inner()(x.to(torch.bfloat16), hint), before, x.dtype)

        def get_models(self) -> Any:
            return [*super().get_models(), self.net_patcher]

        def copy(self) -> Any:
            new = copy.copy(self)
            self.copy_to(new)
            return new

    class ThroughThePatcher(OtherNames):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            del self.net

        def inner(self) -> Any:
            return self.net_patcher.model

    return {cls.__name__: cls for cls in (Louder, OtherNames, ThroughThePatcher)}


def drawn_with(studio: Studio, *controls: Any) -> torch.Tensor:
    """What a tiny Flux draws with ControlNets, one chained to the other."""
    import nodes

    model, words = stock_patcher(tiny.flux()), studio.conditions(tiny.WIDTH, tiny.WIDTH)
    hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(9))
    for control in controls:
        words, _ = nodes.ControlNetApplyAdvanced().apply_controlnet(words, words, control, hint, 1.0, 0.0, 1.0)
    return studio.latent(model, words)


def test_controlnets_of_a_pack(studio: Studio, controls: dict[str, Any]) -> None:
    from comfy.controlnet import ControlNet

    other = ControlNet(tiny.control_model(), load_device=tiny.devices()[0])
    placed_other, plain = studio.place_component(other, spread(studio)), drawn_with(studio)
    for name, cls in controls.items():
        given, calls_patcher = cls(tiny.control_model()), name == "ThroughThePatcher"
        alone = drawn_with(studio, given)
        assert not torch.equal(plain, alone)
        placed = check(studio, given, lambda control: drawn_with(studio, control), not calls_patcher, share="30%")
        chained = drawn_with(studio, given, other)
        assert not torch.equal(chained, alone)
        assert torch.equal(drawn_with(studio, placed, placed_other), chained)
        counted(studio, placed)
        if calls_patcher and studio.simulated:
            with pytest.raises(ValueError, match=f"^a {name} {REFUSED}choose {studio.accelerators[0]} as its compute"):
                studio.place_component(given, compute=studio.accelerators[1])
            assert torch.equal(drawn_with(studio, given), alone)


def test_a_controlnet_that_comes_with_others_keeps_them(studio: Studio, controls: dict[str, Any]) -> None:
    """A pack may chain ControlNets before they are applied, and apply the last one itself."""
    first, last = (controls["OtherNames"](tiny.control_model()) for _ in range(2))
    hint = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(9))
    for control in (first, last):
        control.set_cond_hint(hint)
    last.set_previous_controlnet(first)
    model = stock_patcher(tiny.flux())

    def use(control: Any) -> torch.Tensor:
        words = studio.conditions(tiny.WIDTH, tiny.WIDTH, control=control, control_apply_to_uncond=True)
        return studio.latent(model, words)

    placed = studio.place_component(last, spread(studio))
    assert placed.previous_controlnet is first
    assert torch.equal(use(placed), use(last)) and not torch.equal(use(last), use(first))


def test_controlnets_without_a_patcher_are_refused(studio: Studio) -> None:
    from comfy.controlnet import ControlLora, T2IAdapter

    for given in (ControlLora({}), T2IAdapter(torch.nn.Linear(2, 2), 3, 8, "nearest-exact")):
        before = dict(vars(given))
        with pytest.raises(ValueError, match=f"^a {type(given).__name__} {REFUSED}"):
            studio.place_component(given, spread(studio))
        assert dict(vars(given)) == before


# -- CLIP_VISION ----------------------------------------------------------------------------------------------------


def test_clip_vision_models_of_a_pack(studio: Studio) -> None:
    class Own:
        """Attributes that cannot be added to, a patcher of its own name, and parts of the model."""

        __slots__ = ("body", "load_device", "net", "wrapped")

        def __init__(self, vision: Any) -> None:
            self.net, self.wrapped = vision.model, stock_patcher(vision.model)
            self.body, self.load_device = vision.model.vision_model, self.wrapped.load_device

        def encode_image(self, image: torch.Tensor) -> dict[str, Any]:
            import comfy.model_management as memory

            memory.load_models_gpu([self.wrapped])
            pixels = image.movedim(-1, 1).to(self.load_device)
            return {"image_embeds": self.body(pixels)[0] + self.net(pixels)[0]}

    @dataclass(frozen=True)
    class Frozen:
        net: Any
        wrapped: Any
        body: Any
        load_device: Any
        encode_image = Own.encode_image

    class NoPatcher(Own):
        def __init__(self, vision: Any) -> None:
            self.net = vision.model

    def use(vision: Any) -> torch.Tensor:
        image = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(1))
        return vision.encode_image(image)["image_embeds"].cpu()

    own = Own(small_vision())
    for given in (own, Frozen(own.net, stock_patcher(own.net), own.body, own.load_device), small_vision()):
        check(studio, given, use)
        studio.unload()
    with pytest.raises(ValueError, match=f"^a NoPatcher {REFUSED}"):
        studio.place_component(NoPatcher(small_vision()), spread(studio))
