"""Sets the attributes on modules from which the host's own code sees how to treat a placed model."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from comfy.model_patcher import move_weight_functions, wipe_lowvram_weight

from .blocks import listed_modules


def mark_loaded(patcher: Any, away: Set[str], in_file: Set[str]) -> None:
    """Mark all modules of the host's load list as loaded and patched, those in `away` also as cast on use.

    A module that is cast on use works wherever its weight is; while its bytes are in the ring on the compute device,
    the cast has nothing to do. Saving reads the mark "patched", and computes the patches of weights without it: those
    that rest `in_file` never have them.
    """
    for name, module in listed_modules(patcher).items():
        if hasattr(module, "comfy_cast_weights"):
            wipe_lowvram_weight(module)
            module.comfy_force_cast_weights = patcher.force_cast_weights
            if name in away or patcher.force_cast_weights:
                module.prev_comfy_cast_weights = module.comfy_cast_weights
                module.comfy_cast_weights = True
            for tensor, functions in (("weight", "weight_function"), ("bias", "bias_function")):
                getattr(module, functions).extend(patcher.weight_wrapper_patches.get(f"{name}.{tensor}", ()))
            move_weight_functions(module, patcher.load_device)
        module.comfy_patched_weights = name not in in_file
