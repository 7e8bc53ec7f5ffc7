"""The Ray actor of a worker: a real ComfyUI without its server, and the service in it that answers calls.

The actor's class is sent to others by value, so that they need not import it under the name that it has here. It takes
and gives bytes only.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..errors import ClusterUnavailable
from .link import Message

NAMESPACE = "multigpu"
RESOURCE = "multigpu:"
"""Before a worker's name: the name of its actor, and of the resource that only its node offers."""

SERVICE = "multigpu.host.remote.boot:boot"
"""`module:function` of what makes the service in a worker from the folder of ComfyUI and its arguments."""


AT_ONCE = 4
"""How many calls are in the service at the same time; further ones wait."""


class Worker:
    """One ComfyUI. The service decides which calls wait for each other; the rest is answered meanwhile."""

    def __init__(self, made_by: str, comfyui: str, arguments: list[str]) -> None:
        from .worker import start_service

        self.service = start_service(made_by, comfyui, arguments)

    def serve(self, method: str, parts: list[Any]) -> list[Any]:
        from .worker import serve

        return serve(self.service, method, parts)

    def describe(self) -> dict[str, Any]:
        from .worker import describe

        return describe()

    def interrupt(self) -> None:
        self.service.interrupt()

    def ping(self) -> None:
        return


def create(name: str, service: str, comfyui: str, arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """Start the actor on this node; returns it and what it says of itself, once its ComfyUI has started.

    If its process dies, Ray starts it again. Raises `ClusterUnavailable` with the reason when it could not be started.
    """
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options = {
        "name": RESOURCE + name, "resources": {RESOURCE + name: 1}, "num_cpus": 0, "max_restarts": -1,
        "concurrency_groups": {"control": 2}, "max_concurrency": AT_ONCE,
    }  # fmt: skip
    control = ray.method(concurrency_group="control")
    methods = {name: control(getattr(Worker, name)) for name in ("describe", "interrupt", "ping")}
    actor = ray.remote(**options)(type("Worker", (Worker,), methods)).remote(service, comfyui, arguments)
    try:
        return actor, ray.get(actor.describe.remote())
    except ray.exceptions.RayError as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        raise ClusterUnavailable(f"the worker {name} could not be started: {said[-1].strip()}") from None


def start_service(made_by: str, comfyui: str, arguments: list[str]) -> Any:
    """What answers calls, made by the function of that name (`SERVICE`)."""
    module, _, name = made_by.partition(":")
    return getattr(importlib.import_module(module), name)(Path(comfyui), arguments)


def serve(service: Any, method: str, parts: list[Any]) -> list[Any]:
    """`[problem, header, *buffers]`; the problem is empty if there is none. No error crosses as an object."""
    from pickle import PickleBuffer

    header, *buffers = (memoryview(part) for part in parts)
    try:
        answer = service.serve(method, Message(bytes(header), buffers))
    except Exception as error:  # noqa: BLE001  whatever it is, the other machine is told
        return [f"{type(error).__name__}: {error}"]
    return ["", *map(PickleBuffer, (answer.header, *answer.buffers))]


def describe() -> dict[str, Any]:
    """The devices of this machine with their memory, and versions."""
    import platform

    import ray
    import torch

    from .. import __version__
    from ..devices.inventory import Inventory

    inventory = Inventory()
    devices = [
        {"name": str(device.id), "total": device.total, "free": inventory.free(device.id)}
        for device in inventory.devices
    ]
    python = platform.python_version()
    versions = {"MultiGPU": __version__, "Ray": ray.__version__, "torch": torch.__version__, "Python": python}
    return {"devices": devices, "versions": versions}
