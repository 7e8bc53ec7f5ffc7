"""The routes: who may ask, what was sent, and the answer as JSON. docs/http.md describes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import comfy.cli_args
from aiohttp import web
from server import PromptServer

from ...errors import HostIncompatible, RequestError
from ...lifecycle.absent import NoFreeFlow
from ...lifecycle.policy import Standing
from ...telemetry import bodies
from ...telemetry.snapshot import Snapshot
from ..lifecycle.free_flow import prompt_runs
from .listeners import Listeners
from .planning import Planning

if TYPE_CHECKING:
    from ...runtime import Runtime
    from ..lifecycle.free_flow import FreeFlow

Answer = tuple[int, Any]
"""An HTTP status, and what the JSON says."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


BROKEN = web.RequestPayloadError, ConnectionError
"""What reading a body raises that does not come as was said, or not at all: the connection was lost."""
WRONG = ValueError, AttributeError, LookupError, RecursionError, *BROKEN
"""What reading a body as JSON raises: no JSON, no object, an unknown charset, nested too deeply, broken on the way."""


@dataclass(eq=False, slots=True)
class Panel:
    """Answers the routes of one process."""

    runtime: Runtime
    planning: Planning
    listeners: Listeners = field(init=False)

    def __post_init__(self) -> None:
        self.listeners = Listeners(self.take, PromptServer.instance.sockets)

    async def snapshot(self) -> Answer:
        return 200, (await asyncio.to_thread(self.take)).to_json()

    def take(self) -> Snapshot:
        return replace(self.runtime.snapshots.take(), frees=self._flow.frees.changes)

    async def history(self) -> Answer:
        return 200, self._flow.frees.to_json()

    async def plan(self, body: dict[str, Any]) -> Answer:
        """A widget with a wrong value is answered with status 200: browsers log any other as a failed request."""
        wanted = bodies.read_plan(body)
        try:
            return 200, await asyncio.to_thread(self.planning.answer, wanted)
        except RequestError as problem:
            if problem.field is None:
                raise
            return 200, {"plan": None, **problem.to_json()}

    async def pin(self, body: dict[str, Any]) -> Answer:
        return await self._choose(body, Standing.KEEP)

    async def unpin(self, body: dict[str, Any]) -> Answer:
        return await self._choose(body, Standing.DEFAULT)

    async def _choose(self, body: dict[str, Any], wanted: Standing) -> Answer:
        model = bodies.read_model(body)
        await asyncio.to_thread(self._with, model, lambda patcher: self._flow.choose(patcher, wanted))
        return 200, {"standing": wanted.value}

    async def eject(self, body: dict[str, Any]) -> Answer:
        """202 if the prompt worker has to unload the model, which it does when it is idle."""
        unloads = await asyncio.to_thread(self._with, bodies.read_model(body), self._flow.eject)
        return 202 if unloads else 200, {"standing": Standing.EJECT.value}

    def _with(self, model_id: str, do: Callable[[Any], Any]) -> Any:
        """What `do` returns for a patcher of a model in a snapshot. Nothing has hold of the patcher afterwards."""
        with self.runtime.lock:
            patcher = self.runtime.snapshots.find(model_id)
            if patcher is None:
                raise RequestError(f"no model {bodies.shown(model_id)} is loaded or held", status=404)
            try:
                return do(patcher)
            finally:
                del patcher

    async def free(self, body: dict[str, Any]) -> Answer:
        wanted = bodies.read_free(body)
        self._flow.ask(unload_models=wanted.unload_models, free_memory=wanted.free_memory)
        return 202, {"waits": prompt_runs()}

    def free_is_asked(self, free_memory: bool) -> None:
        """By the host's own route."""
        self._flow.asked(free_memory=free_memory)

    @property
    def _flow(self) -> FreeFlow:
        flow = self.runtime.free_flow
        assert not isinstance(flow, NoFreeFlow), "the panel is off where keep and eject are"
        return flow

    async def settings(self) -> Answer:
        return 200, self.runtime.settings.to_json()

    async def change_settings(self, body: dict[str, Any]) -> Answer:
        self.runtime.change_settings(body)
        return await self.settings()

    async def listen(self, body: dict[str, Any]) -> Answer:
        wanted = bodies.read_listen(body)
        if self.listeners.listen(wanted):
            await asyncio.to_thread(self._flow.expect_choices)
        return 200, {}


def new_panel(runtime: Runtime) -> Panel:
    """For the host's server in this process."""
    hoist, others = runtime.settings.hoist, runtime.remote is not None
    planning = Planning(
        runtime.inventory, runtime.capabilities, lambda: runtime.resolver,
        models=lambda: runtime.snapshots.models(), hoist=hoist, others=others,
    )  # fmt: skip
    return Panel(runtime, planning)


def add_routes(panel: Panel) -> None:
    """Add the routes to those of the host's server, before that starts to answer."""
    server = PromptServer.instance
    for get in (panel.snapshot, panel.history, panel.settings):
        server.routes.get(f"/multigpu/{get.__name__}")(_getting(get))
    for post in (panel.plan, panel.pin, panel.unpin, panel.eject, panel.free, panel.listen):
        server.routes.post(f"/multigpu/{post.__name__}")(_posting(post))
    server.routes.post("/multigpu/settings")(_posting(panel.change_settings))
    server.app.middlewares.append(_noting_frees(panel))


def _noting_frees(panel: Panel) -> Any:
    """Sees the requests to the host's own route that frees memory. For others it is no part of what answers them."""

    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        with suppress(*WRONG):  # the host's own code says what is wrong with it
            panel.free_is_asked(bool((await request.json()).get("free_memory", False)))
        return await handler(request)

    @web.middleware
    def passing(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        frees = request.method == "POST" and request.path in ("/free", "/api/free")
        return note(request, handler) if frees else handler(request)

    return passing


def _getting(handler: Callable[[], Awaitable[Answer]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def asked(request: web.Request) -> Answer:
        _check_origin(request)
        return await handler()

    async def answer(request: web.Request) -> web.Response:
        return await _answered(asked(request))

    return answer


def _posting(
    handler: Callable[[dict[str, Any]], Awaitable[Answer]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def asked(request: web.Request) -> Answer:
        _check_origin(request)
        bodies.check_type(request.content_type, request.charset)
        return await handler(bodies.read_body(await _read(request)))

    async def answer(request: web.Request) -> web.Response:
        told = await _answered(asked(request))
        if request.content.exception() is not None:  # aiohttp would read on, and log the same exception as unhandled
            request.content.feed_eof()
            told.force_close()
        return told

    return answer


def _check_origin(request: web.Request) -> None:
    allowed = comfy.cli_args.args.enable_cors_header
    bodies.check_origin(request.headers.get("Origin"), request.headers.get("Host"), allowed)


async def _answered(answer: Awaitable[Answer]) -> web.Response:
    try:
        status, told = await answer
    except RequestError as problem:
        status, told = problem.status, problem.to_json()
    except HostIncompatible as problem:
        status, told = 409, RequestError(str(problem)).to_json()
    return web.json_response(told, status=status)


async def _read(request: web.Request) -> bytes:
    """The body, of which no more is read than may be sent."""
    if (request.content_length or 0) > bodies.MOST_BYTES:
        raise bodies.too_large()
    text = bytearray()
    try:
        async for piece in request.content.iter_chunked(bodies.MOST_BYTES):
            text += piece
            if len(text) > bodies.MOST_BYTES:
                raise bodies.too_large()
    except BROKEN:
        raise bodies.broken() from None
    return bytes(text)
