"""This machine's side: from a place node with a remote device to a component whose compute is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comfy import model_management

from ...errors import ClusterUnavailable, HostError, InputError, MultiGPUError, RemoteDeviceLost
from ...remote.cluster import LOST, Cluster, Node
from ...remote.facts import Facts, FileFact, check
from ...remote.names import RemoteDevice, is_remote
from ...telemetry.snapshot import DeviceMemory
from ..lifecycle.prompts import PromptWatch
from .calls import Line, RemoteComponent, in_own_thread
from .describe import DESCRIBED
from .file_facts import named_files
from .graphs import Graph, cut, run_here, source_of
from .proxies import proxy
from .versions import versions

if TYPE_CHECKING:
    from ...runtime import Runtime

log = logging.getLogger("multigpu")

COMPUTE = "compute_device"
LOOK_SECONDS = 5.0
"""The nodes of the cluster are asked for this often, while somebody looks at the nodes' widgets or at the panel."""
REFUSED = {
    "control_net": "its residuals are larger than the latents (25 MB per block for Flux), and would be sent at every "
    "step; place the model and its ControlNet on the same machine",
    "clip_vision": "only MODEL, CLIP and VAE can compute on another machine; choose a device of this machine",
}
"""Components that are not put on another machine alone, and why."""


def connected(runtime: Runtime, head: str) -> Remote:
    """The components on the nodes of the cluster with that head. It is not asked for anything yet."""
    return Remote(runtime, Cluster(head, stop_if_interrupted))


def stop_if_interrupted() -> None:
    """Raises the host's interruption if the user has asked for it, in the thread that runs the prompt.

    The host forgets that it was asked as soon as it is raised once.
    """
    if not in_own_thread():
        model_management.throw_exception_if_processing_interrupted()


class Remote:
    """The components of this process that are on other machines."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        self._runtime = runtime
        self.fall_back = runtime.settings.fall_back
        self._cluster = cluster
        self.prompts = PromptWatch()
        self._lines: dict[str, Line] = {}
        self._losses: dict[str, int] = {}
        self._files: dict[str, tuple[str, FileFact]] = {}
        """By name: the node that was last asked about the file, and what it said."""
        self._nodes: dict[str, Node] = {}
        """By name, as last seen. A lost one keeps its devices."""
        self._looked = 0.0
        self._looking = threading.Lock()

    # -- for the nodes ----------------------------------------------------------------------------------------

    def labels(self) -> list[str]:
        """The names of `devices`. A list that is old does no harm, because nodes accept every name."""
        return [device.device for device in self.devices()]

    def devices(self) -> list[DeviceMemory]:
        """The devices of other machines, as last seen. Waits for nobody: looks again in the background."""
        if time.monotonic() - self._looked > LOOK_SECONDS and self._looking.acquire(blocking=False):
            threading.Thread(target=self._look, name="multigpu-nodes", daemon=True).start()
        return [
            DeviceMemory(
                f"ray://{node.name}/{its.name}",
                its.free,
                its.total or 0,
                state=node.state,
                in_use=its.free is not None or its.total is None,
            )
            for node in self._nodes.values()
            for its in node.devices
        ]

    def _look(self) -> None:
        known = self._nodes
        try:
            found = {node.name: node for node in self._cluster.nodes()}
            self._nodes = {
                name: node if node.devices or name not in known else replace(node, devices=known[name].devices)
                for name, node in found.items()
            }
        except MultiGPUError as problem:
            if not self._looked or any(node.state != LOST for node in known.values()):
                log.warning("[MultiGPU] %s", problem)
            self._nodes = {name: replace(node, state=LOST) for name, node in known.items()}
        finally:
            self._looked = time.monotonic()
            self._looking.release()

    def losses(self, device: str) -> int:
        """How often the node of a device was lost: a component of before has to be built again."""
        return next((count for node, count in self._losses.items() if f"/{node}/" in device.lower()), 0)

    def build(self, kind: str, device: RemoteDevice) -> Any:
        """The component that the node that runs now is to place on a device of another machine.

        Everything upstream of the node, and the node itself, runs there. Raises `MultiGPUError` with the reason if
        that machine cannot be used, or is not like this one.
        """
        if kind in REFUSED or kind not in DESCRIBED:
            raise InputError(f"a {kind.replace('_', ' ')} cannot be put on {device} alone: {REFUSED.get(kind, '')}")
        prompt, own = self.prompts.now()
        if prompt is None:
            raise HostError("a component can be put on another machine only while ComfyUI runs a prompt")
        graph = cut(prompt, own)
        inputs = graph[own]["inputs"]
        donors = [str(inputs.get(name, "")) for name in ("donor_device", "expert_mode_allocations")]
        if any(is_remote(part) for text in donors for part in text.replace(";", ",").split(",")):
            raise InputError(
                f"the weights of a component on {device} cannot rest on another machine than where it computes; name "
                "donors as they are called there, such as cpu"
            )
        source = source_of(graph, own, kind)
        graph[own]["inputs"] = {**inputs, COMPUTE: device.there}
        try:
            line = self.line(device.node)
            self.agree(line, graph)
            told = line.call("build", kind, graph=graph, link=[own, 0], kind=kind)
        except (RemoteDeviceLost, ClusterUnavailable) as lost:
            if not self.fall_back:
                raise
            log.warning("[MultiGPU] %s; the %s is loaded on this machine (MULTIGPU_FALL_BACK)", str(lost), kind)
            return run_here(graph, source)
        here: Callable[[], Any] | None = None
        if self.fall_back:
            here = lambda: run_here(graph, source)  # noqa: E731
        log.info("[MultiGPU] %s computes on %s", told["name"], device)
        return proxy(RemoteComponent(line, device, told, here))

    def line(self, node: str) -> Line:
        """The calls to a node. After a loss, a new link is made."""
        if node not in self._lines:
            self._lines[node] = Line(self._cluster.link(node), self._lost)
        return self._lines[node]

    def interrupt(self, node: str) -> None:
        """Tell a node to stop what it computes for this machine. Returns at once."""
        if node in self._lines:
            self._lines[node].link.interrupt()

    def _lost(self, node: str) -> None:
        self._losses[node] = self._losses.get(node, 0) + 1
        self._lines.pop(node, None)

    # -- the handshake ----------------------------------------------------------------------------------------

    def agree(self, line: Line, graph: Graph) -> None:
        """Raises `RemoteMismatch` unless the node has the versions, nodes and files that the subgraph needs.

        The files are not opened here: their sizes are compared with this machine's, their headers among all nodes.
        """
        files = named_files(node["inputs"] for node in graph.values())
        classes = frozenset(node["class_type"] for node in graph.values())
        here = Facts("this machine", versions(self._runtime), classes, tuple(files))
        there = self._facts(line, classes, [each.name for each in files])
        check(here, there)
        for each in there.files:
            node, known = self._files.get(each.name, (line.link.node, each))
            self._files[each.name] = line.link.node, each
            if node != line.link.node and known != each:
                self._agree_now(node, each.name, there)

    def _agree_now(self, node: str, file: str, there: Facts) -> None:
        """Raises `RemoteMismatch` if a node has another header of a file, unless the file was changed or is gone."""
        with suppress(RemoteDeviceLost, ClusterUnavailable):
            now = self._facts(self.line(node), there.nodes, [file])
            ours = tuple(each for each in there.files if each.name == file)
            if [each.size for each in now.files] == [each.size for each in ours]:
                check(now, replace(there, files=ours))

    def _facts(self, line: Line, classes: Collection[str], files: list[str]) -> Facts:
        answer = line.call("facts", nodes=sorted(classes), files=files)
        return replace(Facts.read(answer), where=f"ray://{line.link.node}")
