"""One graph with several seeds, on several machines at the same time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import Caching
from comfy_execution.cache_provider import register_cache_provider

from ...errors import ClusterUnavailable, InputError, RemoteDeviceLost
from ...remote.names import check_node, is_remote, parse_remote
from .calls import OWN_THREADS
from .client import COMPUTE, Remote, stop_if_interrupted
from .graphs import Graph, Link, cut, run_here, source_of

log = logging.getLogger("multigpu")

HERE = "here"
"""This machine, among the names of nodes."""
SEEDS = ("seed", "noise_seed")
"""The inputs of nodes that are seeds."""
MOST_SEED = 2**64
LOOK_SECONDS = 0.1
"""How often it is looked whether the user has interrupted."""
STOP_SECONDS = 5.0
"""How long runs that are interrupted are waited for. An interruption just before one begins has no effect, so it is
repeated meanwhile."""
LOST = RemoteDeviceLost, ClusterUnavailable


@dataclass(frozen=True, slots=True)
class Run:
    """The run of one seed on another machine: the graph as it is called there, and the output that is its result."""

    node: str
    graph: Graph
    source: Link
    result: Future[Any]


class FanOuts:
    """The runs on other machines of the prompt that runs now, by the node that has asked for them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._running: dict[str, list[Run]] = {}
        self._prompt_end: PromptEnd | None = None

    def start(self, input_name: str, count: int, machines: str) -> bool:
        """Start the runs of the node that is asked now, once. Returns whether this machine has a share, the first."""
        here, nodes = read_machines(machines)
        prompt, own = self._remote.prompts.now()
        if prompt is None:
            raise InputError("seeds can be fanned out only while ComfyUI runs a prompt")
        if self._prompt_end is None:
            self._prompt_end = PromptEnd(self._stop_all)
            register_cache_provider(self._prompt_end)
        if own not in self._running:
            graph = cut(prompt, own)
            source = source_of(graph, own, input_name)
            del graph[own]
            numbers = [*range(int(here), count)]
            if numbers and not nodes:
                raise InputError(f"{machines!r} names no machine for {count} seeds; write for example node-b, here")
            used = [nodes[turn % len(nodes)] for turn in range(len(numbers))]
            graphs = [on_node(seeded(graph, number), node) for number, node in zip(numbers, used, strict=True)]
            lost = self._agree(dict(zip(used, graphs, strict=True)))
            self._running[own] = self._submit(used, graphs, source, lost)
        return here

    def results(self, value: Any) -> list[Any]:
        """The results of the node that runs now, in the order of the seeds; `value` is this machine's, if any.

        If one run fails, or the user interrupts, all machines are told to stop. With fall back on, the runs of a lost
        machine are made here instead.
        """
        _, own = self._remote.prompts.now()
        runs, found = dict(enumerate(self._running[own])), dict[int, Any]()
        while going := {number: run for number, run in runs.items() if number not in found}:
            stop_if_interrupted()
            wait([run.result for run in going.values()], LOOK_SECONDS, FIRST_COMPLETED)
            found |= {number: self._result(run) for number, run in going.items() if run.result.done()}
        del self._running[own]
        return [*([] if value is None else [value]), *(found[number] for number in runs)]

    def _agree(self, graphs: Mapping[str, Graph]) -> dict[str, Exception]:
        """Compare this machine with the nodes. With fall back on, returns those that are lost, else raises."""
        lost: dict[str, Exception] = {}
        for node, graph in graphs.items():
            try:
                self._remote.agree(self._remote.line(node), graph)
            except LOST as problem:
                if not self._remote.fall_back:
                    raise
                lost[node] = problem
        return lost

    def _submit(
        self, nodes: Sequence[str], graphs: Sequence[Graph], source: Link, lost: Mapping[str, Exception]
    ) -> list[Run]:
        """One thread for each machine, so that each gets its next run when it has finished the one before."""
        threads = {node: ThreadPoolExecutor(1, thread_name_prefix=f"{OWN_THREADS}{node}") for node in {*nodes}}
        runs = []
        for node, graph in zip(nodes, graphs, strict=True):
            result = threads[node].submit(self._run, node, graph, source, lost.get(node))
            runs.append(Run(node, graph, source, result))
        for thread in threads.values():
            thread.shutdown(wait=False)
        return runs

    def _run(self, node: str, graph: Graph, source: Link, lost: Exception | None) -> Any:
        if lost is not None:
            raise lost
        return self._remote.line(node).call("run", graph=graph, link=list(source))["value"]

    def _result(self, run: Run) -> Any:
        """What a run gave, or gives here if its machine is lost and fall back is on: this is the prompt's thread."""
        try:
            return run.result.result()
        except LOST as lost:
            if not self._remote.fall_back:
                raise
            log.warning("[MultiGPU] %s; this machine computes its seed (MULTIGPU_FALL_BACK)", str(lost))
            return run_here(run.graph, run.source)

    def _stop_all(self) -> None:
        """End what still runs: the node that has asked for it was not reached, or has failed."""
        runs = [run for its in self._running.values() for run in its]
        self._running.clear()
        for run in runs:
            run.result.cancel()
        end = time.monotonic() + STOP_SECONDS
        while (going := [run for run in runs if not run.result.done()]) and time.monotonic() < end:
            for node in {run.node for run in going}:
                self._remote.interrupt(node)
            wait([run.result for run in going], LOOK_SECONDS)


class PromptEnd(Caching.CacheProvider):
    """Caches nothing: of the host's external caches, only the end of a prompt is of use here."""

    def __init__(self, then: Callable[[], None]) -> None:
        """`then` is called at the end of every prompt, however it ends."""
        self._then = then

    def should_cache(self, context: Any, value: Any = None) -> bool:
        return False

    async def on_lookup(self, context: Any) -> Any:
        return None

    async def on_store(self, context: Any, value: Any) -> None:
        """Never called."""

    def on_prompt_end(self, prompt_id: str) -> None:
        self._then()


def read_machines(text: str) -> tuple[bool, list[str]]:
    """Whether this machine is among those named, and the others. Raises `InputError` for what is no name."""
    names = [name.strip().lower() for name in text.replace(";", ",").split(",") if name.strip()]
    others = [parse_remote(name).node if is_remote(name) else check_node(name) for name in names if name != HERE]
    return HERE in names, [*dict.fromkeys(others)]


def seeded(graph: Graph, number: int) -> Graph:
    """A graph with `number` added to each of its seeds. Raises `InputError` if it has none."""
    seeds = [
        (node_id, name) for node_id, node in graph.items() for name in SEEDS if type(node["inputs"].get(name)) is int
    ]
    if not seeds:
        raise InputError(f"nothing upstream has a seed to be changed; there is no input {' or '.join(SEEDS)}")
    new = {node_id: {**node, "inputs": dict(node["inputs"])} for node_id, node in graph.items()}
    for node_id, name in seeds:
        new[node_id]["inputs"][name] = (graph[node_id]["inputs"][name] + number) % MOST_SEED
    return new


def on_node(graph: Graph, node: str) -> Graph:
    """A graph with the devices of a node named as they are called there. Raises `InputError` for those of others."""
    new = {node_id: {**each, "inputs": dict(each["inputs"])} for node_id, each in graph.items()}
    for each in new.values():
        device = each["inputs"].get(COMPUTE)
        if isinstance(device, str) and is_remote(device):
            named = parse_remote(device)
            if named.node != node:
                raise InputError(f"{device} is on another machine than {node}, which is to run the whole graph")
            each["inputs"][COMPUTE] = named.there
    return new


def together(values: Sequence[Any]) -> Any:
    """Pictures, masks or latents as one batch, in order. Raises `InputError` for anything else."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(tuple(values))
    if all(isinstance(value, dict) and isinstance(value.get("samples"), torch.Tensor) for value in values):
        return {"samples": torch.cat([value["samples"] for value in values])}
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise InputError(f"only pictures, masks and latents can be fanned out, not {kinds}")
