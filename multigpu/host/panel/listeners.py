"""Snapshots for the clients that listen, over the host's websocket. Nothing runs while nobody listens."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import RequestError
from ...telemetry.bodies import ListenBody, shown
from ...telemetry.snapshot import NOISE, Snapshot

log = logging.getLogger("multigpu")

EVENT = "multigpu.snapshot"
PERIOD = 0.5
"""Seconds between two snapshots."""
EACH = 0.1
"""For each client, seconds that pass at least between two messages in which nothing but memory figures is new: these
change all the time, and to send one takes a tenth of a millisecond."""
LASTS = 300.0
"""Seconds after which a client that has not asked again no longer listens."""


class Listeners:
    """Takes one snapshot for all clients, and sends it to them if something has changed. Used on the event loop."""

    def __init__(self, take: Callable[[], Snapshot], sockets: Mapping[str, Any]) -> None:
        """`take` is called on a thread of its own. `sockets` are those of the host's clients, by client id."""
        self._take = take
        self._sockets = sockets
        self._until: dict[str, float] = {}
        self._behind: set[str] = set()
        """Clients that have not been sent the blocks of the models as they are now planned."""
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.taken = 0
        """Counts the snapshots."""

    @property
    def running(self) -> bool:
        """Whether snapshots are being taken: as long as a client listens."""
        return self._task is not None

    def listen(self, wanted: ListenBody) -> bool:
        """Begin, go on, or stop to send to a client. Returns whether it begins.

        Raises RequestError for a client that is not connected.
        """
        if not wanted.on:
            self._stop(wanted.client)
            return False
        if wanted.client not in self._sockets:
            raise RequestError(f"no client {shown(wanted.client)} is connected to ComfyUI's websocket", status=404)
        begins = wanted.client not in self._until
        if begins:
            self._behind.add(wanted.client)
        self._until[wanted.client] = time.monotonic() + LASTS
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return begins

    def _stop(self, client: str) -> None:
        self._until.pop(client, None)
        self._behind.discard(client)

    async def _run(self) -> None:
        try:
            last: Snapshot | None = None
            told, next_figures = False, 0.0
            while self._drop_gone():
                try:
                    snapshot = await asyncio.to_thread(self._take)
                except Exception:  # whatever it is, the next one may be possible
                    if not told:
                        log.exception("[MultiGPU] the panel cannot be shown what is in memory; it is tried again")
                    told = True
                    await _pause(PERIOD)
                    continue
                self.taken += 1
                now = time.monotonic()
                noise = NOISE if now >= next_figures else math.inf
                changed = last is None or snapshot.differs(last, noise)
                if last is None or snapshot.plans != last.plans:
                    self._behind |= self._until.keys()
                self._send(snapshot, [*self._until] if changed else [*self._behind])
                if changed:
                    last, next_figures = snapshot, now + EACH * len(self._until)
                await _pause(PERIOD)
        finally:
            self._task = None

    def _drop_gone(self) -> bool:
        """Forget the clients that are gone; whether any are left."""
        now = time.monotonic()
        for client, until in [*self._until.items()]:
            if now > until or client not in self._sockets:
                self._stop(client)
        return bool(self._until)

    def _send(self, snapshot: Snapshot, clients: list[str]) -> None:
        """Written once for all, without blocks for those who have them. A client that has not taken the last one yet is
        left out."""
        self._sending = {client: task for client, task in self._sending.items() if not task.done()}
        texts: dict[bool, str] = {}
        for client in clients:
            socket = self._sockets.get(client)
            if socket is not None and client not in self._sending:
                blocks = client in self._behind
                if blocks not in texts:
                    texts[blocks] = json.dumps({"type": EVENT, "data": snapshot.to_json(blocks=blocks)})
                self._behind.discard(client)
                self._sending[client] = asyncio.get_running_loop().create_task(_sent(socket, texts[blocks]))


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _sent(socket: Any, text: str) -> None:
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):  # it is gone, or being closed
        return
