"""Clients that listen: who gets a snapshot and when, how many are taken, and when it ends. The test sets the time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from multigpu.errors import RequestError
from multigpu.host.panel import listeners as module
from multigpu.host.panel.listeners import LASTS, PERIOD, Listeners
from multigpu.plan.types import CPU, Placement, Plan, Reason
from multigpu.telemetry.bodies import ListenBody
from multigpu.telemetry.snapshot import NOISE, DeviceMemory, ModelMemory, Snapshot

PLAN = Plan(CPU, (Placement("one", 3, CPU, CPU, Reason.RESIDENT),), 0)
EMPTY = Snapshot("", "", 0.0, 0, (DeviceMemory("cpu", 5, 10),))


class Socket:
    """A client's websocket; while `gate` is closed, it takes nothing."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.breaks = False

    async def send_str(self, text: str) -> None:
        await self.gate.wait()
        if self.breaks:
            raise ConnectionResetError
        self.got.append(json.loads(text))


class World:
    """Memory that changes when the test says so, a clock, and clients that are connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.taken = 0
        self.process = 0
        self.broken = False
        self.plan: Plan | None = None
        self.now = 100.0
        self.sockets: dict[str, Socket] = {}
        self.ticks: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.listeners = Listeners(self.take, self.sockets)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))  # asyncio keeps its own clock
        monkeypatch.setattr(module, "_pause", self.pause)

    def take(self) -> Snapshot:
        if self.broken:
            raise RuntimeError("dictionary changed size during iteration")
        self.taken += 1
        model = ModelMemory("Flux", "m1", "cpu", 0, "default", {}, dynamic=False, plan=self.plan)
        time, process = float(self.taken), self.process
        return replace(EMPTY, time=time, process_bytes=process, held=self.held, models=(model,))

    async def pause(self, seconds: float) -> None:
        assert seconds == PERIOD
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ticks.put_nowait(until)
        await until

    async def tick(self) -> None:
        """Let half a second pass, and everything happen that follows."""
        self.now += PERIOD
        (await self.ticks.get()).set_result(None)
        await self.settle()

    async def settle(self) -> None:
        while self.listeners.running and self.ticks.empty():
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)

    async def listen(self, *names: str, on: bool = True) -> None:
        for name in names:
            self.sockets.setdefault(name, Socket())
            self.listeners.listen(ListenBody(name, on))
        await self.settle()

    def told(self, name: str, event: str = "multigpu.snapshot") -> list[dict[str, Any]]:
        return [its["data"] for its in self.sockets[name].got if its["type"] == event]

    def blocks(self, name: str) -> list[int | None]:
        """How many blocks of the model came with each snapshot; None if none were told."""
        models = [snapshot["models"][0] for snapshot in self.told(name)]
        return [len(model["blocks"]) if "blocks" in model else None for model in models]

    def got(self, name: str) -> list[int]:
        return [snapshot["held"] for snapshot in self.told(name)]

    def figures(self, name: str) -> list[int]:
        """The bytes of the process in each message that has figures only."""
        return [figures["process"] for figures in self.told(name, "multigpu.figures")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def run(story: Any) -> None:
        async def told() -> None:
            world = World(monkeypatch)
            await story(world)

        asyncio.run(asyncio.wait_for(told(), 30))

    yield run


def test_one_snapshot_for_all_and_only_when_something_changes(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("a", "b", "c")
        assert [world.got(name) for name in "abc"] == [[0], [0], [0]] and world.taken == 1
        for _ in range(3):
            await world.tick()
        assert [world.got(name) for name in "abc"] == [[0], [0], [0]] and world.taken == 4
        world.held = 2
        await world.tick()
        assert [world.got(name) for name in "abc"] == [[0, 2]] * 3 and world.taken == 5

    run(story)


def test_blocks_are_sent_when_a_plan_has_changed(run: Any) -> None:
    """Who missed them gets them with the next message; who comes later with the first one."""

    async def story(world: World) -> None:
        world.plan = PLAN
        await world.listen("a", "slow")
        world.held = 1
        await world.tick()
        assert [world.blocks(name) for name in ("a", "slow")] == [[1, None], [1, None]]
        world.sockets["slow"].gate.clear()
        for world.held, world.plan in ((2, PLAN), (3, None), (4, None)):
            await world.tick()
        assert world.blocks("a") == [1, None, None, 0, None]
        await world.listen("late")
        world.sockets["slow"].gate.set()
        await world.tick()
        await world.tick()
        assert world.blocks("slow") == [1, None, None, 0] and world.blocks("late") == [0]

    run(story)


def test_of_figures_that_change_only_they_are_sent(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("a", "slow")
        sent = []
        for step in (NOISE, 2, 1, 2 * NOISE):  # each a little too small to be told, or not
            world.process += step
            await world.tick()
            sent.append(world.process)
        for name in ("a", "slow"):
            assert (world.got(name), world.figures(name)) == ([0], [sent[1], sent[3]])
        (last, _) = world.sockets["a"].got[-1]["data"], world.sockets["slow"].gate.clear()
        assert last == {"time": float(world.taken), "process": sent[3], "devices": [[5, 0]]}
        world.held = 1
        await world.tick()  # the slow one takes its time for this
        world.held = 2
        await world.tick()
        world.sockets["slow"].gate.set()
        await world.settle()
        world.process += 2 * NOISE
        await world.tick()
        assert (world.got("a"), world.figures("a")[2:]) == ([0, 1, 2], [world.process])
        assert (world.got("slow"), world.figures("slow")[2:]) == ([0, 1, 2], []), "it had missed more than figures"

    run(story)


def test_who_comes_later_is_told_at_once(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("a")
        await world.listen("b")
        await world.tick()
        assert world.got("a") == [0] and world.got("b") == [0]
        await world.listen("b")
        await world.tick()
        assert world.got("b") == [0], "it has only said that it is still there"

    run(story)


def test_it_ends_with_the_last_client(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("a", "b")
        await world.listen("a", on=False)
        del world.sockets["b"]
        await world.tick()
        taken = world.taken
        assert not world.listeners.running and world.ticks.empty()
        await world.listen("a")
        assert world.taken == taken + 1 and world.got("a") == [0, 0]

    run(story)


def test_a_client_that_does_not_ask_again_is_forgotten(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("a", "b")
        world.now += LASTS - 2 * PERIOD
        await world.listen("b")
        await world.tick()
        assert world.listeners.running
        world.held = 1
        world.now += 2 * PERIOD
        await world.tick()
        assert (world.got("a"), world.got("b")) == ([0], [0, 1])
        world.now += LASTS
        await world.tick()
        assert not world.listeners.running

    run(story)


def test_a_slow_or_broken_client_holds_nobody_up(run: Any) -> None:
    async def story(world: World) -> None:
        await world.listen("slow", "broken", "good")
        world.sockets["slow"].gate.clear()
        world.sockets["broken"].breaks = True
        for world.held in (1, 2, 3):
            await world.tick()
        assert world.got("good") == [0, 1, 2, 3]
        world.sockets["slow"].gate.set()
        await world.settle()
        assert world.got("slow") == [0, 1], "what it has not taken is not kept for it"
        world.held = 4
        await world.tick()
        assert world.got("slow") == [0, 1, 4]

    run(story)


def test_a_snapshot_that_fails_is_logged_once_and_the_next_one_is_sent(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        await world.listen("a")
        world.broken = True
        for _ in range(3):
            await world.tick()
        world.broken, world.held = False, 1
        await world.tick()
        assert world.got("a") == [0, 1]

    run(story)
    (line,) = caplog.records
    assert "tried again" in line.getMessage() and line.exc_info is not None


def test_a_client_has_to_be_connected(run: Any) -> None:
    async def story(world: World) -> None:
        with pytest.raises(RequestError, match="no client 'x' is connected") as problem:
            world.listeners.listen(ListenBody("x", on=True))
        assert problem.value.status == 404 and not world.listeners.running
        world.listeners.listen(ListenBody("x", on=False))

    run(story)
