"""A Ray cluster as ComfyUI sees it: its nodes, and links to them. Ray itself runs in another process (`relay`)."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerYet
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ..errors import ClusterUnavailable, RemoteDeviceLost, RemoteError
from . import frames
from .link import Buffer, Message
from .node import RUN, environment, last_line
from .token import check_token, make_token, token_file
from .worker import SERVICE

REQUIRED = "ray>=2.56,<2.61"
PROBE_SECONDS = 2.0
START_SECONDS = 90.0
WORKER_START_SECONDS = 600.0
"""ComfyUI starts within this time, however many packs it has."""

NODES_SECONDS = 20.0
"""How long the cluster may take to list its nodes. A lost head is noticed before."""

CHECK_SECONDS = 0.1
"""How often a call that waits looks whether it was interrupted."""

INTERRUPTED_SECONDS = 5.0
"""How long an interrupted call waits for the node to stop."""

READY, STARTING, LOST = "ready", "starting", "lost"

Answer = tuple[dict[str, Any], list[memoryview]]


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """A device of a node, with its memory in bytes where that is known."""

    name: str
    total: int | None
    free: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A worker of the cluster. Its devices and versions are known when it is ready."""

    name: str
    state: str
    devices: tuple[NodeDevice, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of this pack and what it needs, by name."""


class Relay:
    """The process that talks to Ray, and the requests that wait for its answers. It ends with this process."""

    def __init__(self, token: Path, start: Mapping[str, Any], limit: float) -> None:
        """Start it and have it connect to the cluster as `start` says. Raises `ClusterUnavailable`."""
        self._folder = Path(tempfile.mkdtemp(prefix="multigpu-"))
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        command = [sys.executable, "-c", RUN.format(module="relay"), str(self._folder)]
        path = self._folder / "relay.log"
        with path.open("wb") as log:
            self._said = path.open("rb")  # can be read when its folder has been deleted, too
            self._process = subprocess.Popen(
                command, env=environment(token, os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            frames.widen(pipe)  # type: ignore[arg-type]
        self._requests = frames.Writer(self._process.stdin)  # type: ignore[arg-type]
        self._reader = threading.Thread(target=self._read, name="multigpu-relay", daemon=True)
        self._reader.start()
        try:
            self.about = self.ask({"do": "start", **start}).result(limit)[0]
        except NoAnswerYet:
            self.close()
            raise ClusterUnavailable(
                f"the Ray cluster at {start['head']} gave no answer within {limit:.0f} s"
            ) from None
        except RemoteError as error:
            self.close()
            raise ClusterUnavailable(f"the Ray cluster at {start['head']} cannot be used: {error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._reader.is_alive()

    def ask(self, about: Mapping[str, Any], parts: Sequence[Buffer] = ()) -> Future[Answer]:
        """Send a request. The answer has a `RemoteError` when it failed, or when this process ends before it comes."""
        number, answer = next(self._numbers), Future[Answer]()
        with self._lock:
            self._waiting[number] = answer
        try:
            self._requests.write(number, dict(about), parts)
        except (OSError, ValueError):
            self._settle(number, RemoteError(self._gone()))
        if not self._reader.is_alive():
            self._settle(number, RemoteError(self._gone()))
        return answer

    def tell(self, about: Mapping[str, Any]) -> None:
        """Send a request that has no answer."""
        with suppress(OSError, ValueError):
            self._requests.write(0, dict(about))

    def wait(self) -> None:
        """Return when the process has ended."""
        self._process.wait()

    def close(self) -> None:
        """End the process and everything that it started; what waits for an answer fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(INTERRUPTED_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._said.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (frame := frames.read(self._process.stdout)) is not None:  # type: ignore[arg-type]
            number, about, parts = frame
            if "unavailable" in about:
                self._settle(number, ClusterUnavailable(about["unavailable"]))
            elif "lost" in about:
                self._settle(number, RemoteError(about["lost"]))
            else:
                self._settle(number, (about, parts))
        for number in list(self._waiting):
            self._settle(number, RemoteError(self._gone()))

    def _settle(self, number: int, answer: Answer | Exception) -> None:
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.cancelled():
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def _gone(self) -> str:
        with self._lock:
            said = "" if self._said.closed or self._said.seek(0) else self._said.read().decode(errors="replace")
        return f"the connection to the cluster has ended ({last_line(said)})"


class Cluster:
    """The cluster with this head. Connects when it is first used, and again when the connection was lost.

    `check` is called while a call waits; when it raises, the node is told to stop, and the call raises that.
    """

    def __init__(self, head: str, check: Callable[[], object] = lambda: None) -> None:
        self.head = head
        self._check = check
        self._relay: Relay | None = None
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    def nodes(self) -> list[Node]:
        """The workers, by name; those that were there before and are gone are lost. Raises `ClusterUnavailable`."""
        asked = self.relay().ask({"do": "nodes"})
        try:
            found = asked.result(NODES_SECONDS)[0]["nodes"]
        except (RemoteError, NoAnswerYet) as error:
            problem = str(error) or f"nothing within {NODES_SECONDS:.0f} s"
            raise ClusterUnavailable(f"the Ray cluster at {self.head} does not answer: {problem}") from None
        there = {about["name"]: _node(about) for about in found}
        self._seen |= set(there)
        return [there.get(name) or Node(name, LOST) for name in sorted(self._seen)]

    def round_trip(self, node: str) -> float:
        """Seconds until a node has answered a call that does nothing: the median of nine. Raises `RemoteError`."""
        times = []
        for _ in range(9):
            before = time.perf_counter()
            try:
                self.relay().ask({"do": "ping", "node": node}).result(NODES_SECONDS)
            except NoAnswerYet:
                raise RemoteDeviceLost(node, "ping", f"no answer within {NODES_SECONDS:g} s") from None
            times.append(time.perf_counter() - before)
        return statistics.median(times)

    def link(self, node: str) -> NodeLink:
        """Calls to one node. Whether it is there, its first call says. Raises `ClusterUnavailable`."""
        return NodeLink(self.relay(), node, self._check)

    def close(self) -> None:
        """End the connection and every process that it needed. It can be used again."""
        with self._lock:
            if self._relay is not None:
                self._relay.close()
                self._relay = None

    def relay(self) -> Relay:
        """The connection, made now if there is none."""
        with self._lock:
            if self._relay is not None and not self._relay.alive:
                self._relay.close()
                self._relay = None
            if self._relay is None:
                token = token_file(os.environ)
                check_token(token)
                host = probe(self.head)
                check_ray()
                self._relay = Relay(token, _start(self.head, own_address(host)), START_SECONDS)
            return self._relay


class NodeLink:
    """A `Link` over a relay."""

    def __init__(self, relay: Relay, node: str, check: Callable[[], object]) -> None:
        self._relay = relay
        self._node = node
        self._check = check
        self._closed = False

    @property
    def node(self) -> str:
        return self._node

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """See `Link.call`."""
        if self._closed:
            raise RemoteDeviceLost(self._node, method, "the link to it was closed")
        about = {"do": "call", "node": self._node, "method": method}
        answer = self._relay.ask(about, (message.header, *message.buffers))
        try:
            said, parts = self._wait(answer, timeout)
        except NoAnswerYet:
            raise RemoteDeviceLost(self._node, method, f"no answer within {timeout:g} s") from None
        except RemoteError as error:
            raise RemoteDeviceLost(self._node, method, str(error)) from None
        if "failed" in said:
            raise RemoteError(f"ray://{self._node}, {method}: {said['failed']}")
        return Message(bytes(parts[0]), parts[1:])

    def interrupt(self) -> None:
        """See `Link.interrupt`."""
        self._relay.tell({"do": "interrupt", "node": self._node})

    def close(self) -> None:
        """See `Link.close`."""
        self._closed = True

    def _wait(self, answer: Future[Answer], timeout: float | None) -> Answer:
        """Raises what `check` raises, once the node has stopped or was given time to."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = CHECK_SECONDS if end is None else min(CHECK_SECONDS, max(0.0, end - time.monotonic()))
            try:
                return answer.result(left)
            except NoAnswerYet:
                if end is not None and time.monotonic() >= end:
                    raise
            try:
                self._check()
            except BaseException:
                self.interrupt()
                with suppress(NoAnswerYet, RemoteError):
                    answer.result(INTERRUPTED_SECONDS)
                raise


def start_worker(
    name: str, head: str, comfyui: Path, arguments: Sequence[str], *, head_here: bool, service: str = SERVICE
) -> Relay:
    """Join the cluster, or start it here, as the worker `name`; returns when its service has started.

    `comfyui` is the folder of ComfyUI, `arguments` are for its command line. Raises `ClusterUnavailable`.
    """
    check_ray()
    token = token_file(os.environ)
    if head_here:
        make_token(token)
    check_token(token)
    own = host_of(head) if head_here else own_address(probe(head))
    worker = {"head_here": head_here, "name": name, "made": [service, str(comfyui), list(arguments)]}
    return Relay(token, {**_start(head, own), **worker}, WORKER_START_SECONDS)


def check_ray() -> None:
    """Raise `ClusterUnavailable` unless Ray is installed. It is not imported in this process."""
    if find_spec("ray") is None:
        raise ClusterUnavailable(f"Ray is not installed for {sys.executable}; pip install '{REQUIRED}'")


def probe(head: str) -> str:
    """The head's address as a number, if something listens there. Raises `ClusterUnavailable` within 2 s.

    A name may take longer to be looked up, and each of its addresses to be tried: that goes on in a thread.
    """
    answer = Future[str]()

    def connect() -> None:
        host, _, port = head.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as connection:
                answer.set_result(str(connection.getpeername()[0]))
        except Exception as error:  # noqa: BLE001  told below
            answer.set_exception(error)

    threading.Thread(target=connect, name="multigpu-probe", daemon=True).start()
    try:
        return answer.result(PROBE_SECONDS)
    except (OSError, ValueError, NoAnswerYet) as error:
        raise ClusterUnavailable(
            f"no Ray head answers at {head} ({str(error) or 'timed out'}); start it there with "
            "`python -m multigpu worker --head-here`"
        ) from None


def host_of(head: str) -> str:
    """The address of a head that is to be started here. Raises `ClusterUnavailable` if it cannot be."""
    host, _, port = head.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port))) as free:
            address = str(free.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterUnavailable(
            f"no Ray head can listen at {head} ({error}); give an address of this machine"
        ) from None
    if address in ("127.0.0.1", "::1", "0.0.0.0", "::"):
        raise ClusterUnavailable(
            f"a Ray head cannot have the address {address}, for which Ray takes another; give the one by which other "
            f"machines know this one, or 127.0.0.2:{port} for this machine alone"
        )
    return address


def own_address(head: str) -> str:
    """This machine's address as the head sees it. On the head's machine itself, if that is loopback, one of our own.

    Several nodes on one machine need different addresses, and Ray replaces 127.0.0.1 by another.
    """
    if ip_address(head).is_loopback:
        return f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
    with socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM) as probing:
        probing.connect((head, 9))  # sends nothing: the system only chooses the address
        return str(probing.getsockname()[0])


def _start(head: str, own: str) -> dict[str, Any]:
    return {"head": head, "own": own, "head_here": False, "name": "", "made": []}


def _node(about: Mapping[str, Any]) -> Node:
    devices = (NodeDevice(each["name"], each["total"], each["free"]) for each in about.get("devices", ()))
    return Node(about["name"], about["state"], tuple(devices), about.get("versions", {}))
