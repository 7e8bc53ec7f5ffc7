"""Runs workflows in this process's ComfyUI, and knows what was asked of the other one."""

from __future__ import annotations

import copy
import gc
import threading
import time
from pathlib import Path
from typing import Any

import torch

from devtools.client import Workflow
from multigpu.remote.codec import pack, unpack
from tests.remote.components.pipe import PipeLink


def without_save(workflow: Workflow) -> Workflow:
    return {name: node for name, node in workflow.items() if name != "save"}


class Studio:
    """This process as the machine where the user sits. `cluster` has the links to the others."""

    def __init__(self, service: Any, remote: Any, cluster: Any, models: Path, elsewhere: Path) -> None:
        """`models` are this machine's files, `elsewhere` those of node-b."""
        self.service = service
        self.remote = remote
        self.cluster = cluster
        self.models = models
        self.elsewhere = elsewhere

    @property
    def link(self) -> PipeLink:
        """That to node-b."""
        link: PipeLink = self.cluster.links["node-b"]
        return link

    def run(self, workflow: Workflow, output: list[Any]) -> Any:
        """An output of a workflow, as the host's own executor makes it."""
        own = copy.deepcopy(workflow)  # the host writes into what it gets
        return self.service._graphs.run(own, tuple(output), threading.Event())

    def draw(self, workflow: Workflow) -> torch.Tensor:
        """The picture that a workflow decodes."""
        pixels: torch.Tensor = self.run(without_save(workflow), ["decode", 0])
        return pixels

    def methods(self) -> list[str]:
        """What was asked of the other machine since the last call."""
        asked = [call.method for call in self.link.calls]
        self.link.calls.clear()
        return asked

    def memory(self) -> Any:
        """What the other machine tells of the model under its last handle."""
        handles = self.handles()
        return unpack(self.link.call("memory", pack({"handle": handles[-1]})))["model"] if handles else None

    def free(self) -> None:
        """What the button does that unloads models, and wait until the prompt worker has done it."""
        from server import PromptServer

        done = threading.Event()
        queue = PromptServer.instance.prompt_queue
        queue.set_flag("unload_models", True)
        while queue.get_flags(reset=False):
            done.wait(0.01)
        self.run({"wait": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}},
                 ["wait", 0])  # fmt: skip

    def handles(self) -> list[str]:
        """The handles that the other machine has."""
        told = unpack(self.link.call("memory", pack({})))
        handles: list[str] = told["handles"]
        return handles

    def forget(self) -> None:
        """Drop everything that this ComfyUI has cached, and wait until the other machine has dropped it, too."""
        from server import PromptServer

        queue = PromptServer.instance.prompt_queue
        queue.set_flag("free_memory", True)
        end = time.monotonic() + 30
        while self.handles():
            gc.collect()
            assert time.monotonic() < end, self.handles()
            time.sleep(0.01)
        self.link.calls.clear()
