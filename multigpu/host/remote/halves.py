"""The two halves of classifier-free guidance on two machines: this one computes cond, the other uncond."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from ...errors import InputError, RemoteDeviceLost
from .calls import OWN_THREADS
from .proxies import RemotePatcher

log = logging.getLogger("multigpu")

KEY = "multigpu_halves"


def halved(model: Any, copy: Any, fall_back: bool) -> Any:
    """A clone of `model` that leaves the negative half of every step to its `copy` on another machine.

    Both are computed at the same time, each as a batch of its own. Steps without a negative half stay here. Raises
    InputError if `copy` is not on another machine, or is of another kind. With `fall_back`, `model` computes both
    halves when the other machine is lost, also if it was when the copy was to be placed.
    """
    if not isinstance(copy, RemotePatcher) and fall_back:
        log.warning("[MultiGPU] the copy computes on this machine, so CFG Halves does nothing (MULTIGPU_FALL_BACK)")
        return model
    if not isinstance(copy, RemotePatcher):
        raise InputError(
            "the copy computes on this machine; connect a Place Model node with the device of another one, such as "
            "ray://node-b/cuda:0"
        )
    if isinstance(model, RemotePatcher) or not isinstance(copy.model, type(model.model)):
        raise InputError(
            f"the model is a {type(model.model).__name__} and its copy a {copy.remote.name} on {copy.remote.device}; "
            "connect the same model to both, and place only the copy on the other machine"
        )

    def halves(executor: Any, inner: Any, conds: list[Any], x: Any, timestep: Any, options: dict[str, Any]) -> Any:
        if len(conds) != 2 or None in conds:
            return executor(inner, conds, x, timestep, options)

        def there() -> Any:
            with torch.inference_mode():
                return executor(copy.model, [None, conds[1]], x, timestep, options)

        copy.model.current_patcher, known = copy, copy.remote.lost
        with ThreadPoolExecutor(1, thread_name_prefix=f"{OWN_THREADS}half") as thread:
            other = thread.submit(there)
            cond = executor(inner, [conds[0], None], x, timestep, options)[0]
            try:
                return [cond, other.result()[1]]
            except RemoteDeviceLost as lost:
                if not fall_back:
                    raise
                if not known:
                    log.warning("[MultiGPU] %s; this machine computes both halves (MULTIGPU_FALL_BACK)", str(lost))
        return [cond, executor(inner, [None, conds[1]], x, timestep, options)[1]]

    new = model.clone()
    new.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, halves)
    return new
