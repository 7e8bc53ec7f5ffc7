"""Real CLIP, VAE and MODEL objects without weights, whose compute is on another machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.sd
import torch
from comfy import model_management
from comfy.conds import CONDRegular
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher

from ...errors import InputError
from ...lifecycle.policy import Standing
from ...telemetry.snapshot import ModelMemory, told_forecast
from .calls import RemoteComponent
from .describe import class_of, made, made_sampling, made_thing

NOT_SENT = ("device", "model_conds", "uuid", "control", "hooks", "gligen", "additional_models")
"""Parts of a conditioning that a model does not need to see: the host's samplers use them here."""
CPU = torch.device("cpu")


def proxy(remote: RemoteComponent) -> Any:
    """A component that looks like the one on the other machine."""
    return PROXIES[remote.told["kind"]](remote)


class RemotePatcher(ModelPatcher):
    """A patcher of a model whose weights are on another machine, so nothing can be done to them here."""

    @property
    def remote(self) -> RemoteComponent:
        model: Any = self.model
        remote: RemoteComponent = model.remote
        return remote

    def _refuse(self, what: str) -> InputError:
        return InputError(
            f"{what} needs the weights of {self.remote.name}, which are on {self.remote.device}; put the node before "
            "the place node, so that it runs there"
        )

    def add_patches(self, *arguments: Any, **named: Any) -> Any:
        raise self._refuse("a LoRA or another patch of weights")

    def add_hook_patches(self, *arguments: Any, **named: Any) -> Any:
        raise self._refuse("a hook that changes weights")

    def get_key_patches(self, *arguments: Any, **named: Any) -> Any:
        raise self._refuse("merging models")

    def model_state_dict_for_saving(self, *arguments: Any, **named: Any) -> Any:
        raise self._refuse("saving a model")

    def add_object_patch(self, name: str, obj: Any) -> None:
        if name.startswith("diffusion_model"):
            raise self._refuse(f"a patch of {name}")
        super().add_object_patch(name, obj)

    def get_free_memory(self, device: torch.device) -> float:
        return float(getattr(self.model, "free_there", 0)) or super().get_free_memory(device)

    def unload_there(self) -> None:
        """Unload the model on the other machine."""
        self.remote.unload()

    def told_memory(self, model_id: str, standing: Standing, loaded: bool) -> ModelMemory:
        """For snapshots: where the weights are, with the names of devices as this machine calls them."""
        told, name, device = self.remote.memory(), type(self.model).__name__, self.remote.device
        known = ModelMemory(name, model_id, str(device), 0, standing.value, {}, dynamic=False, loaded=loaded)
        if told is None:
            return known
        return replace(
            known,
            device=f"ray://{device.node}/{told['compute']}",
            resting={f"ray://{device.node}/{where}": count for where, count in told["homes"].items()},
            **{name: told[name] for name in ("loaded_bytes", "dynamic", "retained", "hoisted", "ring")},
            forecast=told["step"] and told_forecast(told["step"]),
        )


def _patcher(model: Any, device: torch.device) -> RemotePatcher:
    cls: Any = RemotePatcher
    patcher: RemotePatcher = cls(model, load_device=device, offload_device=CPU)
    return patcher


class Stub(torch.nn.Module):
    """Stands where the host keeps a model. `remote` is the component on the other machine; clones share it."""

    def __init__(self, remote: RemoteComponent) -> None:
        super().__init__()
        self.remote = remote


class RemoteTokenizer:
    """The tokenizer of a CLIP on another machine, with that machine's embeddings."""

    def __init__(self, remote: RemoteComponent) -> None:
        self._remote = remote

    def tokenize_with_weights(self, text: Any, return_word_ids: bool = False, **options: Any) -> Any:
        return self._remote.call("tokenize", text=text, word_ids=return_word_ids, options=options)

    def decode(self, token_ids: Any, **options: Any) -> Any:
        return self._remote.call("detokenize", tokens=token_ids, options=options)

    def state_dict(self) -> dict[str, Any]:
        return {}


class RemoteTextEncoder(Stub):
    """`cond_stage_model` of a CLIP."""

    def __init__(self, remote: RemoteComponent) -> None:
        super().__init__(remote)
        self._options: dict[str, Any] = {}

    def reset_clip_options(self) -> None:
        self._options.clear()

    def set_clip_options(self, options: dict[str, Any]) -> None:
        self._options.update(options)

    def encode_token_weights(self, tokens: Any) -> tuple[Any, ...]:
        layer, projected = self._options.get("layer"), self._options.get("projected_pooled", True)
        found = self.remote.call("encode_text", tokens=tokens, layer=layer, projected=projected)
        return found.pop("cond"), found.pop("pooled_output"), found

    def generate(self, tokens: Any, **options: Any) -> Any:
        return self.remote.call("generate_text", tokens=tokens, options=options)


def _clip(remote: RemoteComponent) -> Any:
    told = remote.told
    clip: Any = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model = RemoteTextEncoder(remote)
    clip.patcher = _patcher(clip.cond_stage_model, CPU)
    clip.patcher.is_clip = True
    clip.tokenizer = RemoteTokenizer(remote)
    clip.apply_hooks_to_conds = None
    clip.layer_idx = told["layer_idx"]
    clip.use_clip_schedule = told["use_clip_schedule"]
    clip.tokenizer_options = told["tokenizer_options"]
    return clip


class RemoteVAE(comfy.sd.VAE):
    """A VAE without weights. What a node may ask of one is asked of the other machine."""

    def __init__(self, remote: RemoteComponent) -> None:
        for name, value in remote.told["attributes"].items():
            setattr(self, name, value)
        self._remote = remote
        self.first_stage_model = made(Stub, {**remote.told["inner"], "remote": remote})
        self.patcher = _patcher(self.first_stage_model, CPU)
        self.device = self.output_device = CPU

    def _ask(self, method: str, **given: Any) -> Any:
        model_management.load_models_gpu([self.patcher])
        return self._remote.call(method, **given).to(model_management.intermediate_device())

    def encode(self, pixel_samples: torch.Tensor) -> Any:
        return self._ask("vae_encode", pixels=pixel_samples)

    def encode_tiled(self, pixel_samples: torch.Tensor, *tiles: Any, **named: Any) -> Any:
        return self._ask("vae_encode_tiled", pixels=pixel_samples, options=_tiles(tiles, named))

    def decode(self, samples_in: torch.Tensor, vae_options: dict[str, Any] | None = None) -> Any:
        return self._ask("vae_decode", samples=samples_in, options=vae_options or {})

    def decode_tiled(self, samples: torch.Tensor, *tiles: Any, **named: Any) -> Any:
        return self._ask("vae_decode_tiled", samples=samples, options=_tiles(tiles, named))

    def spacial_compression_decode(self) -> Any:
        return self._remote.told["compression"][0]

    def spacial_compression_encode(self) -> Any:
        return self._remote.told["compression"][1]

    def temporal_compression_decode(self) -> Any:
        return self._remote.told["compression"][2]

    def get_sd(self) -> Any:
        return self.patcher.model_state_dict_for_saving()


def _tiles(given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(("tile_x", "tile_y", "overlap", "tile_t", "overlap_t"), given, strict=False)), **named}


class RemoteDiffusionModel(Stub):
    """`diffusion_model` of a MODEL: each forward is one call."""

    def forward(self, *positional: Any, **named: Any) -> Any:
        options = dict(named.get("transformer_options", {}))
        wrappers = options.pop("wrappers", {}).get("diffusion_model", {})
        for wrapper in (each for its in wrappers.values() for each in its):
            raise InputError(
                f"{wrapper!r} wraps the diffusion model of {self.remote.name}, which is on {self.remote.device}; put "
                "the node that adds it before the place node, so that it runs there"
            )
        options.pop("callbacks", None)
        options["uuids"] = [str(each) for each in options.get("uuids", ())]
        named = {key: value for key, value in named.items() if key != "transformer_options"}
        result = self.remote.call("denoise", once="named", positional=[*positional], options=options, named=named)
        return _on(result, positional[0].device)


def _on(value: Any, device: torch.device) -> Any:
    return [_on(item, device) for item in value] if isinstance(value, (list, tuple)) else value.to(device)


class RemoteModel(BaseModel):
    """Comes before the model's own class: what the model makes of conditions may need weights."""

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        own: Any = self
        device = given["device"]
        given = {name: value for name, value in given.items() if name not in NOT_SENT}
        found = own.remote.call("conditions", once="given", given=given)
        self.free_there = found["free"]
        return {
            name: class_of((module, cls), CONDRegular)(_moved(cond, device))
            for name, (module, cls, cond) in found["conditions"].items()
        }


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _model(remote: RemoteComponent) -> Any:
    told = remote.told
    cls = class_of(told["class"], BaseModel)
    model = made(type(f"Remote{cls.__name__}", (RemoteModel, cls), {}), told["attributes"])
    model.remote = remote
    model.model_type = ModelType[told["model_type"]]
    model.model_config = made_thing(told["config"])
    model.latent_format = made_thing(told["latent"])
    model.model_sampling = made_sampling(told["sampling"])
    model.diffusion_model = made(RemoteDiffusionModel, {**told["diffusion"]["attributes"], "remote": remote})
    model.current_patcher = None
    model.device = CPU
    model.free_there = told["free"]
    patcher = _patcher(model, model_management.get_torch_device())
    patcher.model_options.update(told["options"])
    return patcher


PROXIES = {"clip": _clip, "vae": RemoteVAE, "model": _model}
