"""Routes under `/lifecycle/` that call `multigpu.api` as another pack would, and show what is held."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from typing import Any

import comfy.model_management as model_management
import torch
from aiohttp import web
from comfy.model_patcher import ModelPatcher
from comfy_execution import cache_provider
from server import PromptServer

from . import nodes

TAKEN_BY: Counter[str] = Counter()
"""How many snapshots each thread has taken for panels."""
SPENT = {"seconds": 0.0}
"""On snapshots for panels, and on sending them."""


def _module(name: str, of: str = "multigpu.multigpu.runtime") -> Any:
    """A module of the pack under test, as ComfyUI loaded it; or one that lies beside the module `of`."""
    for loaded in list(sys.modules):
        if loaded.endswith(of):
            beside = f"{loaded.rpartition('.')[0]}.{name}"
            __import__(beside)
            return sys.modules[beside]
    raise LookupError(f"{of} is not loaded")


def _watched(take: Any) -> Any:
    def taking() -> Any:
        began = time.thread_time()
        taken = take()
        SPENT["seconds"] += time.thread_time() - began
        TAKEN_BY[threading.current_thread().name] += 1
        return taken

    return taking


def _sampler() -> threading.Thread:
    return next(its for its in threading.enumerate() if "prompt_worker" in its.name)


def _sampler_time() -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(_sampler().ident or 0))


async def _pause(seconds: float) -> None:
    """Until the sampler has computed for so long, or is idle."""
    until = _sampler_time() + seconds
    await asyncio.sleep(seconds)
    while PromptServer.instance.prompt_queue.currently_running and _sampler_time() < until:
        await asyncio.sleep(0.01)


def _sum(model: torch.nn.Module) -> float:
    return float(sum(weight.double().abs().sum() for weight in model.parameters()))


def add_routes() -> None:
    routes = PromptServer.instance.routes
    _add_looking(routes)
    _add_calls(routes)
    _add_interference(routes)


def _add_looking(routes: web.RouteTableDef) -> None:
    """What is held, and what was seen."""

    @routes.get("/lifecycle/history")
    async def history(_: web.Request) -> web.Response:
        return web.json_response([json.loads(snapshot.json()) for snapshot in _module("api").memory_history()])

    @routes.get("/lifecycle/held")
    async def held(_: web.Request) -> web.Response:
        ledger = _module("runtime").current().free_flow.retention.ledger
        return web.json_response(
            {
                "models": sorted(type(model).__name__ for model in ledger.retained_models()),
                "anchors": len(ledger.anchors()),
                "records": len(ledger.records),
                "snapshots": len(_module("api").memory_history()),
                "collector_callbacks": len(gc.callbacks),
                "providers": len(cache_provider._get_cache_providers()),
                "prompt_handlers": len(PromptServer.instance.on_prompt_handlers),
            }
        )

    @routes.get("/lifecycle/panel")
    async def panel(_: web.Request) -> web.Response:
        """How many snapshots were taken for clients that listen, whether more will be, and the ids in snapshots."""
        runtime = _module("runtime").current()
        listeners, number = runtime.panel.listeners, _module("routes", of="multigpu_debug.routes").number
        ids = {number(model): its for model, its in [*runtime.snapshots._ids.items()]}
        return web.json_response({"taken": listeners.taken, "running": listeners.running, "ids": ids})

    @routes.post("/lifecycle/watch_panel")
    async def watch_panel(_: web.Request) -> web.Response:
        """From now on, note what snapshots and their sending take, and which threads take snapshots.

        Every figure counts as changed, and while a prompt runs, the time between two snapshots is the sampler's: what
        other programs leave of the processor to it makes no difference.
        """
        if not TAKEN_BY:
            listening = _module("host.panel.listeners", of=".multigpu.api")
            listeners = _module("runtime").current().panel.listeners
            listeners._take, send, sent = _watched(listeners._take), listeners._send, listening._sent

            def sending(*given: Any) -> None:
                began = time.thread_time()
                send(*given)
                SPENT["seconds"] += time.thread_time() - began

            async def one(*given: Any) -> None:
                began = time.thread_time()
                await sent(*given)
                SPENT["seconds"] += time.thread_time() - began

            listening.NOISE, listening._pause = -1, _pause
            listening.Listeners._send, listening._sent = (lambda _, *given: sending(*given)), one
        return web.Response()

    @routes.get("/lifecycle/cpu")
    async def cpu(_: web.Request) -> web.Response:
        """CPU seconds: of the sampler's thread, of this one, and of snapshots and their sending. And who took any."""
        told = {"sampler": _sampler_time(), "loop": time.thread_time(), "panels": SPENT["seconds"]}
        return web.json_response({**told, "by_sampler": TAKEN_BY[_sampler().name], "taken": TAKEN_BY.total()})

    @routes.get("/lifecycle/alive")
    async def alive(_: web.Request) -> web.Response:
        """Every model that is in memory, loaded or not: class, its number, and what its weights add up to."""
        gc.collect()
        patchers = [thing for thing in gc.get_objects() if isinstance(thing, ModelPatcher)]
        number = _module("routes", of="multigpu_debug.routes").number
        models = {number(patcher.model): patcher.model for patcher in patchers}
        return web.json_response([(type(model).__name__, its, _sum(model)) for its, model in models.items()])

    @routes.get("/lifecycle/before")
    async def before(_: web.Request) -> web.Response:
        return web.json_response(nodes.LOADED_BEFORE)

    @routes.get("/lifecycle/waiting")
    async def waiting(_: web.Request) -> web.Response:
        return web.json_response(nodes.WAITING.is_set())


def _add_calls(routes: web.RouteTableDef) -> None:
    """Functions of `multigpu.api`, called as another pack would."""

    @routes.post("/lifecycle/let_go")
    async def let_go(_: web.Request) -> web.Response:
        """Forget what earlier tests said about any model."""
        api = _module("api")
        ledger = _module("runtime").current().free_flow.retention.ledger
        loaded = [entry.model.model for entry in model_management.current_loaded_models if entry.model is not None]
        for model in [*ledger.known_models(), *loaded]:
            if hasattr(model, api.FLAG):
                delattr(model, api.FLAG)
        return web.json_response(api.clear_all_retention_anchors("a new test"))

    @routes.post("/lifecycle/clean_up")
    async def clean_up(request: web.Request) -> web.Response:
        return web.json_response(_module("api").force_full_system_cleanup(**await request.json()))

    @routes.post("/lifecycle/log")
    async def log(request: web.Request) -> web.Response:
        wanted = await request.json()
        snapshot = _module("api").multigpu_memory_log(wanted["identifier"], wanted["tag"], as_json=wanted["as_json"])
        return web.json_response({"line": snapshot.line(), "load": _module("api").comfyui_memory_load("asked")})

    @routes.post("/lifecycle/anchor")
    async def anchor(request: web.Request) -> web.Response:
        wanted = (await request.json())["model"]
        for entry in model_management.current_loaded_models:
            if type(entry.model.model).__name__ == wanted:
                _module("api").add_retention_anchor(entry.model, "a test")
        return web.Response()

    @routes.post("/lifecycle/clear")
    async def clear(_: web.Request) -> web.Response:
        return web.json_response(_module("api").clear_all_retention_anchors("a test"))

    @routes.post("/lifecycle/soft_empty")
    async def soft_empty(request: web.Request) -> web.Response:
        """With arguments, ComfyUI's function first."""
        if given := await request.json():
            model_management.soft_empty_cache(**given)
        return web.json_response(_module("api").soft_empty_cache_multigpu())


def _add_interference(routes: web.RouteTableDef) -> None:
    """What other packs and users may do at a bad moment."""

    @routes.post("/lifecycle/flag")
    async def flag(request: web.Request) -> web.Response:
        """Set the attribute by hand, as another pack may."""
        wanted = await request.json()
        for entry in model_management.current_loaded_models:
            if type(entry.model.model).__name__ == wanted["model"]:
                setattr(entry.model.model, _module("api").FLAG, wanted["flag"])
        return web.Response()

    @routes.post("/lifecycle/forget_records")
    async def forget_records(_: web.Request) -> web.Response:
        """As if nothing had been recorded up to now."""
        _module("runtime").current().free_flow.retention.ledger.records.clear()
        return web.Response()

    @routes.post("/lifecycle/unload")
    async def unload(request: web.Request) -> web.Response:
        """Unload one model, as the host does when another one needs the memory."""
        wanted = (await request.json())["model"]
        others = [its for its in model_management.current_loaded_models if type(its.model.model).__name__ != wanted]
        model_management.free_memory(1e30, model_management.get_torch_device(), keep_loaded=others)
        return web.Response()

    @routes.post("/lifecycle/sabotage")
    async def sabotage(_: web.Request) -> web.Response:
        """Let someone unload everything right after the next unload, once."""
        recorder = _module("runtime").current().recorder
        take = recorder.take

        def taking(identifier: str, tag: str, **named: Any) -> Any:
            snapshot = take(identifier, tag, **named)
            if tag == "post-unload":
                del recorder.take
                model_management.free_memory(1e30, model_management.get_torch_device())
            return snapshot

        recorder.take = taking
        return web.Response()

    @routes.post("/lifecycle/trip")
    async def trip(_: web.Request) -> web.Response:
        """Let a step at the end of a prompt fail, once."""
        flow = _module("runtime").current().free_flow
        learn = flow._learn

        def failing() -> None:
            flow._learn = learn
            raise RuntimeError("tripped on purpose")

        flow._learn = failing
        return web.Response()

    @routes.post("/lifecycle/gate")
    async def gate(request: web.Request) -> web.Response:
        (nodes.GATE.set if (await request.json())["open"] else nodes.GATE.clear)()
        nodes.WAITING.clear()
        return web.Response()
