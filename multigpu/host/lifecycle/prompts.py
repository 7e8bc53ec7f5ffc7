"""The prompt that runs, and the `keep_loaded` choices of its nodes.

The choices are read from the graph, so that they also count for nodes that do not run because their output is cached.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import nodes
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...errors import InputError
from ...lifecycle.policy import Standing
from ...lifecycle.prompt import Prompt, source_of

KEEP_LOADED = "keep_loaded"
"""The input with which a node chooses keep, eject or default."""

OWN_NODES = __name__.rpartition(".host.")[0] + "."
"""What the module names of our node classes begin with."""


class PromptWatch:
    """Knows the prompt that runs. Used by the prompt worker only."""

    def __init__(self) -> None:
        self.number = 0
        """Counts the prompts."""
        self._source = ("", "")

    def start(self, prompt_id: str) -> Prompt:
        """Note that a prompt begins. Returns it as it was submitted."""
        self.number += 1
        item = _running_item(prompt_id)
        return Prompt({}) if item is None else Prompt(item[2], self._source_of(prompt_id))

    def running(self) -> Prompt | None:
        """The prompt that runs, including nodes that other nodes have added to it; None if none runs."""
        state = get_progress_state()
        if not state.prompt_id:
            return None
        prompt = state.dynprompt
        every = ChainMap(prompt.ephemeral_prompt, prompt.original_prompt)
        return Prompt(every, self._source_of(state.prompt_id), prompt.ephemeral_parents)

    def running_id(self) -> str:
        """The id of the prompt that runs; empty if none does."""
        return get_progress_state().prompt_id or ""

    def now(self) -> tuple[Prompt | None, str]:
        """The prompt and the node that execute right now; None and "" when called outside of a node."""
        context = get_executing_context()
        prompt = None if context is None else self.running()
        if context is None or prompt is None or context.node_id not in prompt.nodes:
            return None, ""
        return prompt, context.node_id

    def words(self, prompt: Prompt) -> Iterator[tuple[str, Standing | None]]:
        """The choice of each of our nodes; None if it is linked to another node's output and so not known yet."""
        for node_id, node in prompt.nodes.items():
            if not is_own(node) or not getattr(nodes.NODE_CLASS_MAPPINGS[node["class_type"]], "KEEPS_LOADED", False):
                continue
            given = node["inputs"].get(KEEP_LOADED, Standing.DEFAULT.value)
            with suppress(InputError):  # the host does not validate a node that leads to no output
                yield node_id, None if isinstance(given, list) else Standing.read(given)

    def _source_of(self, prompt_id: str) -> str:
        if self._source[0] != prompt_id:
            item = _running_item(prompt_id)
            self._source = prompt_id, "" if item is None else source_of(item[3])
        return self._source[1]


def is_own(node: Any) -> bool:
    """Whether a node of a submitted prompt, which may not be validated yet, is one of ours."""
    name = node.get("class_type") if isinstance(node, dict) else None
    found = nodes.NODE_CLASS_MAPPINGS.get(name) if isinstance(name, str) else None
    return getattr(found, "__module__", "").startswith(OWN_NODES)


def _running_item(prompt_id: str) -> Any:
    """The queue's entry of a running prompt: number, id, nodes, extra data and more. None where there is no server."""
    server = getattr(PromptServer, "instance", None)
    running, _ = server.prompt_queue.get_current_queue_volatile() if server is not None else ([], [])
    return next((item for item in running if item[1] == prompt_id), None)
