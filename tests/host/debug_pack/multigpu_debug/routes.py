"""The routes under `/debug/`."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import weakref
from typing import Any

import comfy.model_management as model_management
from aiohttp import web
from server import PromptServer

from . import memory
from .snapshot import Snapshot

FLAG = "_mgpu_unload_distorch_model"

_numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_count = itertools.count(1)


def add_routes(snapshot: Snapshot) -> None:
    routes = PromptServer.instance.routes

    @routes.get("/debug/models")
    async def models(_: web.Request) -> web.Response:
        return web.json_response([_row(loaded) for loaded in list(model_management.current_loaded_models)])

    @routes.get("/debug/memory")
    async def process_memory(request: web.Request) -> web.Response:
        facts = {"pid": os.getpid(), **memory.of_process()}
        if "everything" in request.query:
            facts["tensors"] = memory.of_everything()
        return web.json_response(facts)

    @routes.get("/debug/patched")
    async def patched(_: web.Request) -> web.Response:
        return web.json_response({"watched": len(snapshot), "differences": snapshot.differences()})

    @routes.get("/debug/idle")
    async def idle(_: web.Request) -> web.Response:
        return web.json_response(_worker_waits())

    @routes.get("/debug/modules")
    async def modules(_: web.Request) -> web.Response:
        return web.json_response(sorted(sys.modules))

    @routes.get("/debug/listening")
    async def listening(_: web.Request) -> web.Response:
        """Whether the pack under test takes snapshots for panels."""
        runtime = next(module for name, module in [*sys.modules.items()] if name.endswith(".multigpu.runtime"))
        return web.json_response(runtime.current().panel.listeners.running)

    @routes.post("/debug/collect")
    async def collect(_: web.Request) -> web.Response:
        return web.json_response(gc.collect())


def _row(loaded: Any) -> dict[str, Any]:
    """One entry of `current_loaded_models`. A patcher that is gone leaves only `alive: false`."""
    patcher = loaded.model
    if patcher is None:
        return {"alive": False}
    model = patcher.model
    return {
        "alive": True,
        "patcher_id": number(patcher),
        "patcher_class": type(patcher).__name__,
        "model_id": number(model),
        "model_class": type(model).__name__,
        "load_device": str(patcher.load_device),
        "offload_device": str(patcher.offload_device),
        "entry_device": str(loaded.device),
        "dynamic": patcher.is_dynamic(),
        "model_size": patcher.model_size(),
        "loaded_size": patcher.loaded_size(),
        "currently_used": bool(loaded.currently_used),
        "flag": getattr(model, FLAG, None),
        "storages": memory.of_module(model),
    }


def number(thing: object) -> int:
    """A number for an object that no later one gets; Python gives the `id` of an object that is gone to another."""
    return _numbers.setdefault(thing, next(_count))


def _worker_waits() -> bool:
    """Whether the prompt worker has nothing to do: no flag and no prompt is set, and it waits for one.

    ComfyUI's `set_flag` notifies once. A worker that was between two waits then sleeps on with the flag set, for up to
    1000 seconds; it is notified again here.
    """
    queue = PromptServer.instance.prompt_queue
    with queue.mutex:
        waits = bool(queue.not_empty._waiters)
        if queue.get_flags(reset=False):
            if waits:
                queue.not_empty.notify()
            return False
        return waits and not queue.queue and not queue.currently_running
