"""From tensors to blocks: in order of execution for known model families, in the order of the file for any other.

A block is one module: the tensors that share a name up to the last dot. Its compute time is an estimate from the
weights' shape and from how many tokens or pixels a module of that role sees; it matters relative to the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import InputError
from ..plan.types import Block, Reason
from .family_table import FAMILIES, GENERIC, Family
from .tensors import TensorInfo

FLOPS = 100e12
"""Operations per second assumed for estimates where nothing was measured."""
COMPONENTS = {
    "diffusion": ("model.diffusion_model.", "diffusion_model."),
    "text": ("cond_stage_model.", "conditioner.", "text_encoders."),
    "vae": ("first_stage_model.", "vae."),
}
"""The parts of a checkpoint that ComfyUI loads as separate models, by the prefix of their tensors."""
_ONCE = re.compile(
    r"(^|[._])(img_mod|txt_mod|mod|modulation|adaLN_modulation|adaln_single|time_in|vector_in|guidance_in|time_embed"
    r"|label_emb|emb_layers|[ty]_embedder|time_embedding|time_projection|time_text_embed|norm_out)([._]|$)"
)
_HOISTED = re.compile(r"(^|[._])(img_mod|txt_mod|mod|modulation|adaLN_modulation|emb_layers|norm_out)([._]|$)")
"""Layers that see one token, the same in all of them: made of the timestep and the pooled text, not of the picture."""
_OTHER_TOKEN = re.compile(r"(^|\.)individual_token_refiner\.")
_TEXT = re.compile(
    r"(^|\.)(txt_|context_|add_[qkv]_|to_add_out|text_embedding|caption_projection|attn2\.to_[kv]|cross_attn\.[kv])"
)
_ATTENTION_OUT = re.compile(r"(attn\w{0,40}\.(proj|o|to_out\.0)|img_attn_proj|linear2|self_attn\.o_proj|attn_output)$")
_EMBEDDING = re.compile(r"(^|[._])(embed_tokens|token_embedding|position_embedding|shared|token_embd|wte)$")
_LEVEL = re.compile(r"(input_blocks|output_blocks)\.([0-9]{1,9})\.")
_BLOCKS_PER_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a file: which family it was taken for, which component it is (None: the whole file), its blocks."""

    family: str
    component: str | None
    blocks: tuple[Block, ...]


def describe_model(
    tensors: Sequence[TensorInfo], component: str | None = None, step_seconds: float | None = None
) -> Model:
    """The blocks of a model in order of execution.

    Of a whole checkpoint one component is taken, the diffusion model unless `component` says another. The compute
    estimates are operations over `FLOPS`; with `step_seconds` they are scaled to that sum instead.
    Raises `InputError` if the component is not there.
    """
    present = [name for name, prefixes in COMPONENTS.items() if any(t.name.startswith(prefixes) for t in tensors)]
    chosen = component or ("diffusion" if len(present) > 1 and "diffusion" in present else None)
    if chosen is not None and chosen not in present:
        raise InputError(f"the file has no component {chosen!r}; it has {', '.join(present) or 'only one model'}")
    modules = _modules(tensors, COMPONENTS[chosen] if chosen else ())
    family = next((f for f in FAMILIES if f.matches(modules)), GENERIC)
    ordered = sorted(modules, key=family.key) if family.ranks else list(modules)
    levels = 1 + max((int(m[2]) for m in map(_LEVEL.match, modules) if m and m[1] == "output_blocks"), default=0)
    work = {name: _operations(family, name, modules[name], levels) for name in ordered}
    whole = sum(work.values())
    rate = 1 / FLOPS if step_seconds is None or not whole else step_seconds / whole
    sizes = {name: sum(tensor.bytes for tensor in modules[name]) for name in ordered}
    blocks = (
        Block(
            name,
            sizes[name],
            order,
            work[name] * rate,
            _immovable(family, name, modules[name]),
            once=_sees_one_token(family, name, modules[name]),
        )
        for order, name in enumerate(ordered)
    )
    return Model(family.name, chosen, tuple(blocks))


def retimed(blocks: Sequence[Block], flops: float) -> list[Block]:
    """Blocks whose compute estimates were made without a measurement, for a device that achieves `flops`."""
    return [replace(block, compute=(block.compute or 0.0) * FLOPS / flops) for block in blocks]


def _modules(tensors: Sequence[TensorInfo], prefixes: tuple[str, ...]) -> dict[str, list[TensorInfo]]:
    """Module name -> its tensors, in the file's order; with prefixes, only the tensors that have one, without it."""
    modules: dict[str, list[TensorInfo]] = {}
    common = prefixes or (
        COMPONENTS["diffusion"] if all(t.name.startswith(COMPONENTS["diffusion"]) for t in tensors) else ()
    )
    for tensor in tensors:
        prefix = next((p for p in common if tensor.name.startswith(p)), None)
        if prefix is None and prefixes:
            continue
        name = tensor.name[len(prefix or "") :]
        modules.setdefault(name.rpartition(".")[0] or name, []).append(tensor)
    return modules


def _weight(tensors: Sequence[TensorInfo]) -> TensorInfo | None:
    """The module's main tensor: the largest one called `weight`."""
    named = [tensor for tensor in tensors if tensor.name.rpartition(".")[2] == "weight"]
    return max(named, key=lambda tensor: tensor.bytes, default=None)


def _immovable(family: Family, name: str, tensors: Sequence[TensorInfo]) -> Reason | None:
    if family.text and _EMBEDDING.search(name):
        return Reason.EMBEDDING
    return Reason.NOT_CASTABLE if _weight(tensors) is None else None


def _sees_one_token(family: Family, name: str, tensors: Sequence[TensorInfo]) -> bool:
    """Whether a module is a linear layer of those that can be hoisted."""
    weight = _weight(tensors)
    linear = weight is not None and len(weight.shape) == 2 and not family.text
    return linear and bool(_HOISTED.search(name)) and not _OTHER_TOKEN.search(name)


def _operations(family: Family, name: str, tensors: Sequence[TensorInfo], output_blocks: int) -> float:
    """Floating-point operations of one step in this module, attention counted with its output projection."""
    weight = _weight(tensors)
    if weight is None or len(weight.shape) < 2 or (family.text and _EMBEDDING.search(name)):
        return 0.0
    if _ONCE.search(name):
        return 2.0 * weight.elements
    tokens = float(family.text_tokens if _TEXT.search(name) else family.tokens)
    level = _LEVEL.match(name)
    if level:
        index = int(level[2]) if level[1] == "input_blocks" else output_blocks - 1 - int(level[2])
        tokens /= 4 ** min(3, index // _BLOCKS_PER_LEVEL)
    attention = 4.0 * tokens * tokens * weight.shape[0] if _ATTENTION_OUT.search(name) else 0.0
    return 2.0 * weight.elements * tokens + attention
