"""`GET /simdev` and `POST /simdev`: read and set the simulated devices of this process over HTTP."""

from __future__ import annotations

from typing import Any

import torch
from aiohttp import web
from server import PromptServer

from .sabotage import Sabotage


def add_routes(world: Any) -> None:
    routes = PromptServer.instance.routes
    sabotage = Sabotage()

    @routes.get("/simdev")
    async def state(_: web.Request) -> web.Response:
        return web.json_response(_state(world))

    @routes.post("/simdev")
    async def change(request: web.Request) -> web.Response:
        """Any of: reset (true), limit ({device: bytes}), cache (bytes), sabotage (name, or null).

        `cache` makes the allocator of every device hold that much and not use it. Answers with the state before.
        """
        wanted = await request.json()
        before = _state(world)
        if wanted.get("reset"):
            world.reset()
        for device, size in wanted.get("limit", {}).items():
            world.limit(device, size)
        for device in world.devices if "cache" in wanted else []:
            torch.empty(wanted["cache"], dtype=torch.uint8, device=device)  # and given back at once
        if "sabotage" in wanted:
            sabotage.choose(wanted["sabotage"])
        return web.json_response(before)


def _state(world: Any) -> dict[str, Any]:
    return {
        "kind": world.kind,
        "contexts": [device for device in world.devices if world.has_context(device)],
        "allocated": {device: world.allocated(device) for device in world.devices},
        "reserved": {device: world.reserved(device) for device in world.devices},
        "peak": {device: world.peak(device) for device in world.devices},
        "moved": {f"{src} > {dst}": size for (src, dst), size in world.links().items()},
        "pinned_bytes": world.pinned_bytes(),
        "races": [{"kind": race.kind, "message": race.message} for race in world.races()],
        "operations": sum(world.operations().values()),
    }
