"""Giving retained models back to the next prompt, through the host's interface for external caches.

The host's executor owns what nodes made, and drops all of it when it is asked to free memory. On every miss it then
asks us. Its own key for a node (class, inputs, and all that is upstream) is our key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nodes
from comfy_api.latest import Caching
from comfy_execution.cache_provider import register_cache_provider, unregister_cache_provider
from server import PromptServer

from .retention import Retention

OWN_NODES = __name__.rpartition(".host.")[0] + "."
"""What the module names of our node classes begin with."""


class HandBack(Caching.CacheProvider):
    """Registered when the first prompt with one of our nodes is submitted; asked by the prompt worker."""

    def __init__(self, retention: Retention, started: Callable[[], None], ended: Callable[[], None]) -> None:
        self._retention = retention
        self._started = started
        self._ended = ended
        self.registered = False

    def watch_prompts(self) -> None:
        """Be ready for that prompt. Its loaders run before our nodes do, so it has to be seen before it begins."""
        PromptServer.instance.add_on_prompt_handler(self._submitted)

    def register(self) -> None:
        if not self.registered:
            self.registered = True
            register_cache_provider(self)

    def unregister(self) -> None:
        if self.registered:
            self.registered = False
            unregister_cache_provider(self)

    def _submitted(self, data: Any) -> Any:
        prompt = data.get("prompt") if isinstance(data, dict) else None
        if not self.registered and isinstance(prompt, dict) and any(_is_own(node) for node in prompt.values()):
            self.register()
        return data

    # -- the host's interface ---------------------------------------------------------------------------------

    def should_cache(self, context: Any, value: Any = None) -> bool:
        """Asked before a lookup, without a value, and when a node has run, with what it made.

        What a node made is recorded here: the host runs `on_store` at some later moment, which may be after the prompt.
        """
        key = _key(context)
        if value is None:
            return self._retention.ledger.knows(key)
        if not value.ui and all(isinstance(slot, list) for slot in value.outputs):
            self._retention.remember(key, value.outputs, _inputs_of(context.node_id))
        return False

    async def on_lookup(self, context: Any) -> Any:
        outputs = self._retention.ledger.hand_back(_key(context))
        return None if outputs is None else Caching.CacheValue(outputs=outputs)

    async def on_store(self, context: Any, value: Any) -> None:
        """Never called: see `should_cache`."""

    def on_prompt_start(self, prompt_id: str) -> None:
        self._started()

    def on_prompt_end(self, prompt_id: str) -> None:
        self._ended()


def _key(context: Any) -> str:
    return f"host {context.cache_key_hash}"


def _is_own(node: Any) -> bool:
    """Whether a node of a submitted prompt, which nobody has validated yet, is one of ours."""
    name = node.get("class_type") if isinstance(node, dict) else None
    found = nodes.NODE_CLASS_MAPPINGS.get(name) if isinstance(name, str) else None
    return getattr(found, "__module__", "").startswith(OWN_NODES)


def _inputs_of(node_id: str) -> dict[str, Any]:
    """The inputs of a node of the running prompt; none for a node that another node added to it."""
    running, _ = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    for item in running:
        node = item[2].get(node_id)
        if node is not None:
            return dict(node["inputs"])
    return {}
