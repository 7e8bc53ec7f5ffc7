"""Subgraphs of prompts: cut out here, run on a worker by its own prompt worker, or node by node on this machine."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import execution
import nodes
from server import PromptServer

from ...errors import InputError, RemoteError
from ...lifecycle.prompt import Prompt
from ..placing.loader_nodes import call, host_node

HAND_OVER = "MultiGPUHandOver"
"""The node at the end of a subgraph on a worker: what it gets is the result. It exists on workers only."""

Graph = dict[str, dict[str, Any]]
"""Nodes by id, in the host's API form."""
Link = tuple[str, int]
"""An output of a node: its id, the number of the output."""


def cut(prompt: Prompt, node_id: str) -> Graph:
    """A node of a prompt and everything that it depends on, as plain data."""
    return {
        each: {"class_type": prompt.nodes[each]["class_type"], "inputs": dict(prompt.nodes[each]["inputs"])}
        for each in prompt.upstream(node_id)
    }


class GraphRunner:
    """Runs subgraphs in this process, through the host's queue, so that its executor, caches and checks apply."""

    def __init__(self) -> None:
        self._results: dict[str, list[Any]] = {}
        results = self._results

        class HandOver:
            RETURN_TYPES = ()
            FUNCTION = "give"
            CATEGORY = ""
            OUTPUT_NODE = True

            @classmethod
            def INPUT_TYPES(cls) -> dict[str, Any]:
                return {"required": {"value": ("*", {}), "ticket": ("STRING", {})}}

            def give(self, value: Any, ticket: str) -> tuple[()]:
                results[ticket] = [value]
                return ()

        nodes.NODE_CLASS_MAPPINGS[HAND_OVER] = HandOver

    def run(self, graph: Graph, link: Link, stopped: threading.Event) -> Any:
        """The output of a subgraph. Raises `RemoteError`, with what the host says, if it does not run.

        `stopped` is set by whoever interrupts the host.
        """
        ticket, end = uuid.uuid4().hex, f"{HAND_OVER} {len(graph)}"
        whole = {**graph, end: {"class_type": HAND_OVER, "inputs": {"value": list(link), "ticket": ticket}}}
        valid, problem, outputs, details = asyncio.run(execution.validate_prompt(ticket, whole, [end]))
        if not valid:
            raise RemoteError(_words(problem, details, graph))
        queue = PromptServer.instance.prompt_queue
        queue.put((0, ticket, whole, {}, outputs, {}))
        try:
            while not (history := queue.get_history(prompt_id=ticket)):
                stopped.wait(0.005)
            if ticket not in self._results:
                raise RemoteError(_failure(history[ticket]))
            return self._results.pop(ticket)[0]
        finally:
            queue.delete_history_item(ticket)
            self._results.pop(ticket, None)


def run_here(graph: Graph, link: Link) -> Any:
    """The output of a subgraph, by calling its nodes one after another. Nothing is cached."""
    done: dict[str, tuple[Any, ...]] = {}

    def value(given: Any) -> Any:
        if isinstance(given, list) and len(given) == 2 and given[0] in graph:
            return output(given[0])[given[1]]
        return given

    def output(node_id: str) -> tuple[Any, ...]:
        if node_id not in done:
            node = graph[node_id]
            inputs = {name: value(given) for name, given in node["inputs"].items()}
            done[node_id] = call(host_node(node["class_type"]), inputs)
        return done[node_id]

    return value(list(link))


def source_of(graph: Graph, node_id: str, name: str) -> Link:
    """The output that is linked to an input. Raises `InputError` if none is."""
    given = graph[node_id]["inputs"].get(name)
    if not isinstance(given, list) or len(given) != 2 or given[0] not in graph:
        raise InputError(f"the input {name} of {graph[node_id]['class_type']} is not linked to a node")
    return given[0], given[1]


def _words(problem: Mapping[str, Any], details: Mapping[str, Any], graph: Graph) -> str:
    """What is wrong with a subgraph, in the host's words."""
    found = [
        f"{graph.get(node_id, {}).get('class_type', node_id)}: {each.get('message')} ({each.get('details')})"
        for node_id, its in details.items()
        for each in its.get("errors", ())
    ]
    return "; ".join(found) or f"{problem.get('message')} ({problem.get('details')})"


def _failure(history: Mapping[str, Any]) -> str:
    for kind, data in history["status"]["messages"]:
        if kind == "execution_error":
            return f"{data['node_type']}: {data['exception_type']}: {data['exception_message'].strip()}"
        if kind == "execution_interrupted":
            return f"{data['node_type']}: it was interrupted"
    return "ComfyUI ran the nodes, but they gave no result"
