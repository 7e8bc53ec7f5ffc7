"""One graph with several seeds, on several machines at the same time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch

from ...errors import InputError, MultiGPUError, RemoteDeviceLost
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


class FanOuts:
    """The runs on other machines of the prompt that runs now, by the node that has asked for them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._prompt = ""
        self._running: dict[str, list[tuple[str, Future[Any]]]] = {}

    def start(self, input_name: str, count: int, machines: str) -> bool:
        """Start the runs of the node that is asked now, once. Returns whether this machine has a share, the first."""
        here, nodes = read_machines(machines)
        prompt, own = self._remote.prompts.now()
        if prompt is None:
            raise InputError("seeds can be fanned out only while ComfyUI runs a prompt")
        if self._prompt != self._remote.prompts.running_id():
            self._prompt, self._running = self._remote.prompts.running_id(), {}
        if own not in self._running:
            graph = cut(prompt, own)
            source = source_of(graph, own, input_name)
            del graph[own]
            numbers = [*range(int(here), count)]
            if numbers and not nodes:
                raise InputError(f"{machines!r} names no machine for {count} seeds; write for example node-b, here")
            runs = [(nodes[turn % len(nodes)], seeded(graph, number)) for turn, number in enumerate(numbers)]
            for node in {node for node, _ in runs}:
                self._remote.agree(self._remote.line(node), on_node(graph, node))
            self._running[own] = self._submit(runs, source)
        return here

    def results(self, value: Any) -> list[Any]:
        """The results of the node that runs now, in the order of the seeds; `value` is this machine's, if any.

        If one run fails, or the user interrupts, all machines are told to stop.
        """
        _, own = self._remote.prompts.now()
        runs = self._running.pop(own)
        try:
            while not all(future.done() for _, future in runs):
                stop_if_interrupted()
                wait([future for _, future in runs], LOOK_SECONDS, FIRST_EXCEPTION)
                for done in (future for _, future in runs if future.done()):
                    done.result()
        except BaseException:
            for _, future in runs:
                future.cancel()
            for node in {node for node, _ in runs}:
                with suppress(MultiGPUError):  # one that was lost has stopped
                    self._remote.line(node).link.interrupt()
            raise
        return [*([] if value is None else [value]), *(future.result() for _, future in runs)]

    def _submit(self, runs: Sequence[tuple[str, Graph]], source: Link) -> list[tuple[str, Future[Any]]]:
        """One thread for each machine, so that each gets its next run when it has finished the one before."""
        nodes = {node for node, _ in runs}
        threads = {node: ThreadPoolExecutor(1, thread_name_prefix=f"{OWN_THREADS}{node}") for node in nodes}
        futures = [(node, threads[node].submit(self._run, node, graph, source)) for node, graph in runs]
        for thread in threads.values():
            thread.shutdown(wait=False)
        return futures

    def _run(self, node: str, graph: Graph, source: Link) -> Any:
        try:
            return self._remote.line(node).call("run", graph=on_node(graph, node), link=list(source))["value"]
        except RemoteDeviceLost as lost:
            if not self._remote.fall_back:
                raise
            log.warning("[MultiGPU] %s; this machine computes its seed (MULTIGPU_FALL_BACK)", lost)
            with torch.inference_mode():
                return run_here(graph, source)


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
