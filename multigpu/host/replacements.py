"""The only place that assigns into the host's modules: for the length of a `with`, or by a `Replacement`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import comfy.model_patcher

from ..errors import HostIncompatible

SWAP = threading.RLock()
"""Held while `CoreModelPatcher` is replaced."""


@contextmanager
def static_patchers() -> Iterator[None]:
    """Loaders called inside, in this thread, make static patchers, also those that offer no argument for it (VAE)."""
    with SWAP:
        before, thread = comfy.model_patcher.CoreModelPatcher, threading.get_ident()

        def chosen(*arguments: Any, **named: Any) -> Any:
            static = threading.get_ident() == thread
            return (comfy.model_patcher.ModelPatcher if static else before)(*arguments, **named)

        comfy.model_patcher.CoreModelPatcher = chosen
        try:
            yield
        finally:
            comfy.model_patcher.CoreModelPatcher = before


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
        complaint = self.complaint()
        if complaint:
            raise HostIncompatible(complaint)
        self._original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.replacement)

    def remove(self) -> None:
        """Put the original back, unless another pack has replaced ours meanwhile: its function may call ours."""
        if self.installed:
            setattr(self.owner, self.name, self._original)
            self._original = None

    def complaint(self) -> str:
        """Why this cannot be installed; empty when it can."""
        full = f"{self.owner.__name__}.{self.name}"
        found = getattr(self.owner, self.name, None)
        if found is None:
            return f"{full} is missing"
        if getattr(found, "__globals__", None) is not vars(self.owner):
            return f"{full} was replaced by another pack ({getattr(found, '__module__', None) or type(found).__name__})"
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.parameters:
            return f"{full} has the parameters ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"
        return ""
