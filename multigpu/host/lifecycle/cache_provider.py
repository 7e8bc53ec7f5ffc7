"""Handing held models back to the next prompt, through the host's interface for external caches.

The host's executor caches the outputs of nodes, and drops them all when it is asked to free memory. For every node
whose output is not in its cache, it asks external caches such as this one before it runs the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import Caching
from comfy_execution.cache_provider import register_cache_provider, unregister_cache_provider
from server import PromptServer

from .prompts import is_own

if TYPE_CHECKING:
    from .free_flow import FreeFlow


class HandBack(Caching.CacheProvider):
    """Registered when the first prompt with one of our nodes is submitted; asked by the prompt worker."""

    def __init__(self, flow: FreeFlow) -> None:
        self._flow = flow
        self.registered = False

    def watch_prompts(self) -> None:
        """Register when the first prompt with one of our nodes is submitted: its loaders run before our nodes do."""
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
        if not self.registered and isinstance(prompt, dict) and any(is_own(node) for node in prompt.values()):
            self.register()
        return data

    # -- the host's interface ---------------------------------------------------------------------------------

    def should_cache(self, context: Any, value: Any = None) -> bool:
        """The host calls this before a lookup, without a value, and after a node has run, with its outputs.

        Outputs are recorded here and not in `on_store`, which the host calls later, perhaps after the prompt.
        """
        if value is None:
            self._flow.tidy()  # the host has not found the output in its cache, so perhaps a loader is about to run
            return self._flow.retention.knows(context.node_id)
        if not value.ui and all(isinstance(slot, list) for slot in value.outputs):
            self._flow.retention.remember(context.node_id, context.cache_key_hash, value.outputs)
        return False

    async def on_lookup(self, context: Any) -> Any:
        """The recorded outputs for a node. `version` is the host's own cache key, which also covers changed inputs."""
        outputs = self._flow.retention.hand_back(context.node_id, context.cache_key_hash)
        return None if outputs is None else Caching.CacheValue(outputs=outputs)

    async def on_store(self, context: Any, value: Any) -> None:
        """Never called: see `should_cache`."""

    def on_prompt_start(self, prompt_id: str) -> None:
        self._flow.prompt_started(prompt_id)

    def on_prompt_end(self, prompt_id: str) -> None:
        self._flow.prompt_ended()
