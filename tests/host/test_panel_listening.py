"""100 open panels: one snapshot for all of them, none on the sampler's thread, and next to no time for them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.host.lifecycle import Keeper, short

pytestmark = pytest.mark.newest

PANELS = 100
RENEW = 120.0
"""Seconds between the messages of one panel that say that it is still open, as in web/panel.js."""
STEPS = 60
PERIOD = 0.5
"""Seconds from one snapshot to the next."""
COSTS = 0.01
"""The share of the sampler's time that all panels together may take."""


class Panels:
    """Clients that do what web/panel.js does, from an open tab to a closed one."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._address = session, address
        self.names = [f"panel-{number}" for number in range(PANELS)]
        self.told: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        """What each knew after each message: a snapshot with the newest figures."""
        self._known: dict[str, int] = {}

    async def get(self, route: str) -> dict[str, Any]:
        async with self._session.get(self._address + route) as answer:
            return dict(await answer.json())

    async def listen(self, name: str, on: bool = True) -> int:
        sent = {"client": name, "on": on}
        async with self._session.post(f"{self._address}/multigpu/listen", json=sent) as answer:
            return answer.status

    @asynccontextmanager
    async def pages(self) -> AsyncIterator[None]:
        """Pages of the frontend whose tab is closed. Their sockets take compressed messages, as those of browsers."""
        where = f"{self._address}/ws?clientId="
        sockets = [await self._session.ws_connect(where + name, compress=15) for name in self.names]
        assert all(socket.compress for socket in sockets)
        tasks = [asyncio.create_task(self._receive(*pair)) for pair in zip(self.names, sockets, strict=True)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for socket in sockets:
                await socket.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The tabs are open: all at once, and each is renewed when its own two minutes are over."""
        assert {*await asyncio.gather(*map(self.listen, self.names))} == {200}
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            assert {await self.listen(name, on=False) for name in self.names} == {200}
            while (await self.get("/lifecycle/panel"))["running"]:
                await asyncio.sleep(0.05)

    async def _receive(self, name: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            told = json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else {"type": None}
            if told["type"] == "multigpu.figures":
                self.told[name].append(with_figures(self.told[name][-1], told["data"]))
            if told["type"] == "multigpu.snapshot":
                self.told[name].append(told["data"])
                if self._known.get(name) != told["data"]["frees"]:
                    self._known[name] = told["data"]["frees"]
                    await self.get("/multigpu/history")

    async def _renew(self) -> None:
        for name in itertools.cycle(self.names):
            await asyncio.sleep(RENEW / PANELS)
            await self.listen(name)

    async def until(self, shown: Any) -> None:
        """Until the last snapshot of every panel is so."""
        while not all(told and shown(told[-1]) for told in self.told.values()):
            await asyncio.sleep(0.05)


def with_figures(snapshot: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """As web/panel.js does it."""
    pairs = zip(snapshot["devices"], figures["devices"], strict=True)
    devices = [device | {"used": used, "cached": cached} for device, (used, cached) in pairs]
    return snapshot | figures | {"devices": devices}


def test_a_hundred_panels_cost_next_to_nothing(keeper: Keeper) -> None:
    asyncio.run(asyncio.wait_for(_hundred_listen(keeper), 120))


async def _hundred_listen(keeper: Keeper) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        panels = Panels(session, keeper.client.address)
        assert await panels.listen("panel-0") == 404, "it is not connected yet"
        async with panels.pages():
            async with panels.open():
                await panels.until(lambda snapshot: snapshot["models"] == [])
                await asyncio.to_thread(keeper.run, short(224, vae="keep"))
                await panels.until(lambda snapshot: "TAESD" in {model["name"] for model in snapshot["models"]})
                newest = {told[-1]["time"] for told in panels.told.values()}
                assert len(newest) <= 2, "the same snapshot for all, or the next one"
                await _costs_next_to_nothing(keeper, panels)
            before = await panels.get("/lifecycle/cpu")
            await asyncio.to_thread(keeper.run, short(226, vae="keep"))
            assert (await panels.get("/lifecycle/cpu"))["taken"] == before["taken"], "the tabs are closed"


async def _costs_next_to_nothing(keeper: Keeper, panels: Panels) -> None:
    """While something is sampled, two snapshots in each second of the sampler's time: every panel is told of each. What
    they, sending them and renewing take, against the sampler's own time.
    """
    await asyncio.to_thread(keeper.client.raw, "/lifecycle/watch_panel", {})
    began = await panels.get("/lifecycle/cpu")
    for name in panels.names:
        await panels.listen(name)
    before, heard = await panels.get("/lifecycle/cpu"), {name: len(told) for name, told in panels.told.items()}
    workflow = short(225, vae="keep")
    workflow["sample"]["inputs"]["steps"] = STEPS
    await asyncio.to_thread(keeper.run, workflow)
    after = await panels.get("/lifecycle/cpu")
    sampler, taken = after["sampler"] - before["sampler"], after["taken"] - before["taken"]
    assert after["by_sampler"] == 0 and taken >= sampler / PERIOD - 1 > 1
    assert {len(panels.told[name]) - count for name, count in heard.items()} <= {taken - 1, taken, taken + 1}
    renewing = (before["loop"] - began["loop"]) * sampler / RENEW
    cost = (after["panels"] - before["panels"] + renewing) / sampler
    assert cost < COSTS
