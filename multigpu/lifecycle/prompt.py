"""A submitted prompt as a graph: what is upstream of a node, and whether two nodes ask for the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Node = Mapping[str, Any]
"""`class_type` and `inputs`, by name; an input is a value or a link, [node id, output number]."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A node that chooses keep, eject or default. `source` tells it from nodes with the same id in other workflows."""

    source: str
    node: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The nodes of a prompt by id, including nodes that other nodes have added while it runs (node expansion).

    `source` names the workflow or client it came from. `parents` gives for each added node the one that added it.
    """

    nodes: Mapping[str, Node]
    source: str = ""
    parents: Mapping[str, str] = field(default_factory=dict)

    def speaker(self, node_id: str) -> Speaker:
        return Speaker(self.source, node_id)

    def links(self, node_id: str) -> Iterator[str]:
        """The nodes whose outputs a node takes, in the alphabetical order of its inputs."""
        inputs = self.nodes[node_id]["inputs"]
        for name in sorted(inputs):
            if _is_link(inputs[name]) and inputs[name][0] in self.nodes:
                yield inputs[name][0]

    def upstream(self, node_id: str, *, added: bool = False) -> list[str]:
        """A node and all nodes it depends on, each once, in an order that does not depend on node ids.

        With `added` also the nodes that those have added to the prompt.
        """
        found: dict[str, None] = {}
        waiting = [node_id]
        while waiting:
            node = waiting.pop(0)
            if node not in self.nodes or node in found:
                continue
            found[node] = None
            waiting += self.links(node)
            if added:
                waiting += [child for child, parent in self.parents.items() if parent == node]
        return list(found)

    def values(self, node_id: str) -> Iterator[Mapping[str, Any]]:
        """The inputs of a node and of every node that its outputs depend on."""
        for node in self.upstream(node_id, added=True):
            yield self.nodes[node]["inputs"]

    def used_outside(self, node_id: str) -> Iterator[str]:
        """The nodes upstream of `node_id` whose outputs are also used by nodes that are not upstream of it."""
        inside = set(self.upstream(node_id))
        for user in self.nodes.keys() - inside:
            yield from (used for used in self.links(user) if used in inside and used != node_id)

    def signature(self, node_id: str, without: Collection[str] = ()) -> str:
        """Equal for two nodes that ask for the same: same class, inputs and upstream nodes, whatever the node ids.

        `without` names inputs of the node itself that are left out.
        """
        order = {node: number for number, node in enumerate(self.upstream(node_id))}
        text = [
            [
                self.nodes[node]["class_type"],
                {
                    name: ["link", order[value[0]], value[1]] if _is_link(value) and value[0] in order else value
                    for name, value in self.nodes[node]["inputs"].items()
                    if node != node_id or name not in without
                },
            ]
            for node in order
        ]
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=repr).encode()).hexdigest()


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def source_of(extra_data: Mapping[str, Any]) -> str:
    """Where a prompt comes from: the workflow's id from the frontend or, for prompts of scripts, the client id."""
    workflow: Any = extra_data.get("extra_pnginfo")
    for name in ("workflow", "id"):
        workflow = workflow.get(name) if isinstance(workflow, Mapping) else None
    if isinstance(workflow, str) and workflow:
        return f"workflow {workflow}"
    return f"client {extra_data.get('client_id')}"
