"""The worker's side: keeps components under handles and computes with them. Runs inside the worker's ComfyUI."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management

from ...errors import RemoteError
from ...remote.codec import pack, unpack
from ...remote.facts import Facts
from ...remote.link import Message
from ..components import find_component
from .describe import describe
from .file_facts import files_here
from .graphs import GraphRunner
from .kept import Keeping, short
from .operations import OPERATIONS, unload
from .versions import versions

if TYPE_CHECKING:
    from ...runtime import Runtime

GONE = "gone"
"""The key of an answer about a handle that this worker does not have: it was started again since."""


class Held:
    """A component under a handle, with the tensors that were sent once for several calls."""

    def __init__(self, component: Any, caller: str) -> None:
        """`caller` is whom the handle was given to."""
        self.component = component
        self.caller = caller
        self.kept = Keeping()


class Service:
    """Answers the calls of other machines. Several threads may call; they compute one after another."""

    def __init__(self, runtime: Runtime, output: Any = None) -> None:
        """`output` are the files that ComfyUI's log is written to; it would fail if they were closed."""
        self._runtime = runtime
        self._output = output
        self._own = uuid.uuid4().hex[:8]
        """In every handle: one that an earlier process has given is not taken for one of this process."""
        self._graphs = GraphRunner()
        self._held: dict[str, Held] = {}
        self._numbers = itertools.count(1)
        self._computing = threading.RLock()
        self._stopped = threading.Event()

    def serve(self, method: str, message: Message, caller: str = "") -> Message:
        """The answer to a call. Raises what the call raised; the link carries its words to the caller."""
        given = unpack(message)
        if method in ("facts", "drop", "memory"):
            return pack(getattr(self, f"_{method}")(**given))
        with self._computing:
            self._stopped.clear()
            model_management.interrupt_current_processing(False)
            try:
                with torch.inference_mode():
                    if method in ("build", "run"):
                        return pack(self._build(caller, **given))
                    return pack(self._operate(method, **given))
            except model_management.InterruptProcessingException:
                raise RemoteError("it was interrupted") from None

    def interrupt(self) -> None:
        """Stop what is being computed, as ComfyUI's own button does."""
        model_management.interrupt_current_processing(True)
        self._stopped.set()

    def versions(self) -> dict[str, str]:
        """Of this machine, by name."""
        return versions(self._runtime)

    def forget(self, callers: Collection[str]) -> None:
        """Drop the handles that these callers have: they are gone, and cannot drop them themselves."""
        for handle in [handle for handle, held in list(self._held.items()) if held.caller in callers]:
            self._drop(handle)

    def _facts(self, nodes: list[str], files: list[str]) -> dict[str, Any]:
        from ..placing.loader_nodes import is_there

        there = frozenset(name for name in nodes if is_there(name))
        return Facts("the worker", versions(self._runtime), there, tuple(files_here(files))).plain()

    def _build(self, caller: str, graph: dict[str, Any], link: list[Any], kind: str | None = None) -> dict[str, Any]:
        """Run a subgraph. A component of a `kind` is kept under a handle and described; without, the value is sent."""
        value = self._graphs.run(graph, (link[0], link[1]), self._stopped)
        if kind is None:
            return {"value": value}
        told = describe(value, kind)
        handle = f"{self._own}-{next(self._numbers)}"
        self._held[handle] = Held(value, caller)
        return {"handle": handle, **told}

    def _operate(self, method: str, handle: str, kept: dict[str, Any] | None = None, **given: Any) -> Any:
        held = self._held.get(handle)
        if held is None:
            return {GONE: handle}
        if method == "unload":
            unload(held.component)
            return {}
        if method not in OPERATIONS:
            raise RemoteError(f"there is no call {method!r}")
        if kept:
            held.kept.take(**kept)
        named: dict[int, list[int]] = {}
        whole = held.kept.whole(given, named)
        return {"value": short(OPERATIONS[method](held.component, **whole), named)}

    def _drop(self, handle: str) -> dict[str, Any]:
        """Forget a handle. When the last one goes, the host's cache is emptied, so that its models are freed."""
        self._held.pop(handle, None)
        if not self._held:
            from server import PromptServer

            for flag in ("unload_models", "free_memory"):
                PromptServer.instance.prompt_queue.set_flag(flag, True)
        return {}

    def _memory(self, handle: str | None = None) -> dict[str, Any]:
        """The handles that there are; and what the model of one of them takes."""
        held = self._held.get(handle) if handle else None
        found = find_component(held.component) if held is not None else None
        if found is None:
            return {"handles": [*self._held], "model": None}
        model = self._runtime.snapshots.model(found.patcher)
        told = {"loaded_bytes": model.loaded_bytes, **model.to_json(blocks=False)}
        return {"handles": [*self._held], "model": told}
