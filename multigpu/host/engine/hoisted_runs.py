"""Tells the engine about the passes of a sampling run, so that layers can be hoisted: see `stream/hoisting.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import WrappersMP

from .model_states import ATTACHMENT, ModelStates

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

log = logging.getLogger("multigpu")

_OF_OTHERS = ("wrappers", "callbacks", "patches", "patches_replace")
"""Options with code of other nodes. It may count calls, so it does not run in probes."""
COMPILED = "torch.compile"
"""The key of the host's wrapper for compiled models. What is in compiled code cannot be left out."""


def watch_runs(patcher: Any, states: ModelStates) -> None:
    """Have the passes of a placed patcher's model go through `HoistedRuns`. Its clones inherit that."""
    patcher.wrappers = {call: dict(by_key) for call, by_key in patcher.wrappers.items()}
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, ATTACHMENT)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, ATTACHMENT, HoistedRuns(states))


@dataclass(frozen=True, slots=True)
class HoistedRuns:
    """A wrapper of the host's `apply_model`, on every placed patcher whose model has layers that can be hoisted."""

    states: ModelStates

    def __deepcopy__(self, memo: dict[int, Any]) -> HoistedRuns:
        return self

    def __call__(
        self,
        executor: WrapperExecutor,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **conditions: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        call = partial(executor, x, t, c_concat, c_crossattn, control, options, **conditions)
        hoisting = self.states.hoisting(executor.class_obj)
        if hoisting is None or COMPILED in options.get("wrappers", {}).get(WrappersMP.APPLY_MODEL, {}):
            return call()

        def model(t: torch.Tensor, options: Mapping[str, Any]) -> Any:
            return executor.original(x, t, c_concat, c_crossattn, None, options, **conditions)

        return hoisting.run(call, _Pass(model, t, options))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One call of a model. `model` calls it with other sigmas and options, without the wrappers of other nodes."""

    model: Callable[[torch.Tensor, Mapping[str, Any]], Any]
    sigmas: torch.Tensor
    options: Mapping[str, Any]

    @property
    def schedule(self) -> torch.Tensor | None:
        sigmas = self.options.get("sample_sigmas")
        return sigmas if isinstance(sigmas, torch.Tensor) else None

    def sigma(self) -> float | None:
        values = {*self.sigmas.flatten().tolist()}
        return values.pop() if len(values) == 1 else None

    def probe(self, sigma: float) -> None:
        options = {name: value for name, value in self.options.items() if name not in _OF_OTHERS}
        if isinstance(options.get("sigmas"), torch.Tensor):
            options["sigmas"] = torch.full_like(options["sigmas"], sigma)
        try:
            self.model(torch.full_like(self.sigmas, sigma), options)
        except Exception:  # a model may do without what is left out here, or not
            log.debug("[MultiGPU] the inputs of hoisted layers could not be found out", exc_info=True)
