"""The Ray actor of a worker: a real ComfyUI without its server, and the service in it that answers calls.

The actor's class is sent to others by value, so that they need not import it under the name that it has here. It takes
and gives bytes only.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from contextlib import suppress
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

LOST_SECONDS = 2.0
"""How often it is looked for callers that are gone."""


class Worker:
    """One ComfyUI. The service decides which calls wait for each other; the rest is answered meanwhile."""

    def __init__(self, made_by: str, comfyui: str, arguments: list[str]) -> None:
        from .worker import start_service

        self.service = start_service(made_by, comfyui, arguments)

    def serve(self, caller: str, method: str, parts: list[Any]) -> list[Any]:
        from .worker import serve

        return serve(self.service, caller, method, parts)

    def describe(self) -> dict[str, Any]:
        from .worker import describe

        return describe(self.service)

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
    service = getattr(importlib.import_module(module), name)(Path(comfyui), arguments)
    threading.Thread(target=forget_lost_callers, args=(service,), name="multigpu-callers", daemon=True).start()
    return service


def forget_lost_callers(service: Any) -> None:
    """Have the service forget what was made for callers that are gone. Never returns.

    A caller is the Ray node of a relay, which ends with it; a node that Ray has given up does not come back.
    """
    import ray

    while True:
        time.sleep(LOST_SECONDS)
        with suppress(Exception):  # while the head does not answer, nothing is known
            service.forget({node["NodeID"] for node in ray.nodes() if not node["Alive"]})


def serve(service: Any, caller: str, method: str, parts: list[Any]) -> list[Any]:
    """`[problem, header, *buffers]`; the problem is empty if there is none. No error crosses as an object."""
    from pickle import PickleBuffer

    header, *buffers = (memoryview(part) for part in parts)
    try:
        answer = service.serve(method, Message(bytes(header), buffers), caller)
    except Exception as error:  # noqa: BLE001  whatever it is, the other machine is told
        return [f"{type(error).__name__}: {error}"]
    return ["", *map(PickleBuffer, (answer.header, *answer.buffers))]


def describe(service: Any) -> dict[str, Any]:
    """The devices of this machine with their memory, and versions. What is free on a device that is not in use is not
    told.
    """
    import platform

    from ..devices.backends import in_use
    from ..devices.inventory import Inventory

    inventory = Inventory()
    devices = [
        {"name": str(its.id), "total": its.total, "free": inventory.free(its.id) if in_use(its.id) else None}
        for its in inventory.devices
    ]
    return {"devices": devices, "versions": {**service.versions(), "Python": platform.python_version()}}
