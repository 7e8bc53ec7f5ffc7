"""The only place that assigns into the modules of the host and of other packs: for the length of a `with`, or by a
`Replacement`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import comfy.model_base
import comfy.model_patcher
import torch

from ..errors import HostIncompatible
from .engine.blocks import late_dtype
from .engine.file_pages import in_file

SWAP = threading.RLock()
"""Held while `CoreModelPatcher` is replaced."""


@contextmanager
def static_patchers(*, in_pages: bool = False) -> Iterator[None]:
    """Loaders called inside, in this thread, make static patchers, also those that offer no argument for it (VAE).

    With `in_pages` the weights of diffusion models stay in the pages of their file, as those of dynamic patchers do.
    """
    with SWAP, ExitStack() as restored:
        before, thread = comfy.model_patcher.CoreModelPatcher, threading.get_ident()

        def chosen(*arguments: Any, **named: Any) -> Any:
            static = threading.get_ident() == thread
            return (comfy.model_patcher.ModelPatcher if static else before)(*arguments, **named)

        def assigned(self: Any, sd: Any, unet_prefix: str = "", assign: bool = False) -> Any:
            if threading.get_ident() != thread:
                return load(self, sd, unet_prefix, assign)
            types = [(module, name, weight.dtype) for module, name, weight in _weights(self)]
            result = load(self, sd, unet_prefix, True)
            for module, name, dtype in types:  # copying would have cast them
                weight = module._parameters[name]
                if weight is None or type(weight) is not torch.nn.Parameter or weight.dtype == dtype:
                    continue
                setattr(module, f"{name}_comfy_model_dtype", dtype)
                if late_dtype(module, name, weight) is None or not in_file(weight):
                    module._parameters[name] = torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False)
            return result

        set_until_closed(restored, comfy.model_patcher, "CoreModelPatcher", chosen)
        if in_pages:
            load = comfy.model_base.BaseModel.load_model_weights
            set_until_closed(restored, comfy.model_base.BaseModel, "load_model_weights", assigned)
        yield


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                yield module, name, weight


def set_until_closed(restored: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute that `owner` has. When `restored` is closed, it is what it was before."""
    restored.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@dataclass
class Replacement:
    """A replacement for a function of a host module, with the parameters that function must have, and the reason.

    Installed and removed any number of times; what was there is put back as the very same object.
    """

    owner: ModuleType
    name: str
    parameters: tuple[str, ...]
    reason: str
    replacement: Callable[..., Any]
    _original: Callable[..., Any] | None = field(default=None, init=False)

    @property
    def installed(self) -> bool:
        return self._original is not None and getattr(self.owner, self.name, None) is self.replacement

    def original(self, *arguments: Any) -> Any:
        """Call the function that was replaced."""
        if self._original is None:
            raise HostIncompatible(
                f"{self.owner.__name__}.{self.name} is not replaced, so there is no original to call"
            )
        return self._original(*arguments)

    def install(self) -> None:
        """Replace the host's function, unless ours is installed and another pack has replaced that one since.

        Raises HostIncompatible, and changes nothing, if another pack replaced the host's function before us or its
        parameters differ.
        """
        if self._original is not None and getattr(self.owner, self.name, None) is not self._original:
            return
        self._check(getattr(self.owner, self.name, None))
        self._original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.replacement)

    def remove(self) -> None:
        """Put the original back, unless another pack has replaced ours meanwhile: its function may call ours."""
        if self.installed:
            setattr(self.owner, self.name, self._original)
            self._original = None

    def _check(self, found: Any) -> None:
        full = f"{self.owner.__name__}.{self.name}"
        if found is None:
            raise HostIncompatible(f"{full} is missing")
        if getattr(found, "__globals__", None) is not vars(self.owner):
            whose = getattr(found, "__module__", None) or type(found).__name__
            raise HostIncompatible(f"{full} was replaced by another pack ({whose})")
        parameters = ", ".join(inspect.signature(found).parameters)
        if parameters != ", ".join(self.parameters):
            raise HostIncompatible(f"{full} has the parameters ({parameters}), expected ({', '.join(self.parameters)})")
