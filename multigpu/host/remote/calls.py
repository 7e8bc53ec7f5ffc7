"""Calls to components on other machines: losing the machine, and what is sent only once."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any

from comfy import model_management

from ...errors import MultiGPUError, NotSendable, RemoteDeviceLost, RemoteError
from ...remote.codec import pack, unpack
from ...remote.link import Link, Message
from ...remote.names import RemoteDevice
from .kept import Sending, Sent
from .operations import OPERATIONS
from .service import GONE

log = logging.getLogger("multigpu")

LATER_SECONDS = 30.0
"""How long a call may take for which nobody waits."""
MEMORY_SECONDS = 0.5
"""How long somebody who looks at memory waits for another machine, once: until it has answered, what it told before is
shown."""
OWN_THREADS = "multigpu-"
"""How the names of our threads begin. Only the thread that runs the prompt looks for interruptions, and computes."""


def in_own_thread() -> bool:
    """Whether this is not the thread that runs the prompt."""
    return threading.current_thread().name.startswith(OWN_THREADS)


class Line:
    """The calls to one node over its link."""

    def __init__(self, link: Link, lost: Callable[[str], None]) -> None:
        """`lost` is told the name of the node when a call finds out that it is gone."""
        self.link = link
        self._lost = lost
        self._later = ThreadPoolExecutor(1, thread_name_prefix=f"{OWN_THREADS}{link.node}")

    def call(self, method: str, component: str = "", **given: Any) -> Any:
        """The answer. Raises what `Link.call` raises, with the name of the component if its node was lost."""
        try:
            message = pack(given)
        except NotSendable as refused:
            raise NotSendable(
                f"{refused}; for {component or method} on ray://{self.link.node}, put the node that adds it before the "
                "place node"
            ) from None
        try:
            answer = unpack(self.link.call(method, message), take_over=True)
            if isinstance(answer, dict) and GONE in answer:
                raise RemoteDeviceLost(self.link.node, method, "its worker was started again")
            return answer
        except RemoteDeviceLost as lost:
            self._lost(self.link.node)
            raise RemoteDeviceLost(lost.node, lost.method, lost.problem, component=component) from None

    def soon(self, method: str, component: str, **given: Any) -> Future[Any]:
        """The answer to a call that is made in the background."""
        return self._later.submit(self.call, method, component, **given)

    def later(self, method: str, **given: Any) -> None:
        """A call whose answer nobody waits for. Takes no time, so that it can be made wherever garbage is collected."""
        with suppress(RuntimeError):  # Python is ending
            self._later.submit(self._quietly, method, pack(given))

    def _quietly(self, method: str, message: Message) -> None:
        with suppress(RemoteError):
            self.link.call(method, message, timeout=LATER_SECONDS)


class RemoteComponent:
    """A component under a handle of another machine. When this object goes, the handle is dropped there."""

    def __init__(self, line: Line, device: RemoteDevice, told: dict[str, Any], here: Callable[[], Any] | None) -> None:
        """`told` is what the worker told when it built the component.

        `here` makes the same component on this machine, for when the other is lost; None: then calls fail.
        """
        self.device = device
        self.name = f"{told['kind']} {told['name']}"
        self.told = told
        self._line = line
        self._handle = str(told["handle"])
        self._here = here
        self._substitute: Any = None
        self._lost: tuple[str, str, str] | None = None
        """The node, the call and the problem when it was found to be lost, which is for good."""
        self._sent = Sent()
        self._asked: Future[Any] | None = None
        self._memory: dict[str, Any] | None = None
        weakref.finalize(self, line.later, "drop", handle=self._handle).atexit = False

    def call(self, method: str, *, once: str = "", **given: Any) -> Any:
        """What one of `OPERATIONS` makes of these values there; here, with a warning, if the machine is lost.

        Large tensors of the dict that `once` names are sent only if they were not sent before (`kept`).
        Raises `RemoteDeviceLost` without fall back, and in threads of ours, because nothing is computed in them.
        """
        if self._lost is None:
            try:
                return self._there(method, once, given)
            except RemoteDeviceLost as found:
                self._lost = found.node, found.method, found.problem
        lost = RemoteDeviceLost(*self._lost, component=self.name)
        if self._here is None or in_own_thread():
            raise lost
        if self._substitute is None:
            log.warning("[MultiGPU] %s; this machine goes on without it (MULTIGPU_FALL_BACK)", lost)
            self._substitute = self._here()
        return OPERATIONS[method](self._substitute, **given)

    @property
    def lost(self) -> bool:
        """Whether a call has found out that the machine is lost."""
        return self._lost is not None

    def unload(self) -> None:
        """Unload the model there. Never fails: the host frees memory, and its prompt worker would end with an error."""
        if self._lost is None:
            try:
                self._line.call("unload", self.name, handle=self._handle)
            except (Exception, model_management.InterruptProcessingException) as problem:  # noqa: BLE001
                log.warning("[MultiGPU] %s was not unloaded: %s", self.name, problem)

    def memory(self) -> dict[str, Any] | None:
        """What the model takes there; None if that is not known. A machine that does not answer is waited for once."""
        wait = MEMORY_SECONDS if self._asked is None else 0.0
        asked = self._asked = self._asked or self._line.soon("memory", self.name, handle=self._handle)
        try:
            self._memory = asked.result(wait)["model"]
        except NotYet:
            return self._memory
        except MultiGPUError:
            self._memory = None
        self._asked = None
        return self._memory

    def _there(self, method: str, once: str, given: dict[str, Any]) -> Any:
        if not once:
            return self._line.call(method, self.name, handle=self._handle, **given)["value"]
        sending = Sending(self._sent)
        short = {key: sending.short(value) for key, value in given[once].items()}
        kept = {"new": sending.new, "converted": sending.converted, "forget": self._sent.surplus(sending.used)}
        try:
            answer = self._line.call(method, self.name, handle=self._handle, kept=kept, **{**given, once: short})
        except BaseException:
            self._sent.forget()  # it is not known what has arrived
            raise
        return sending.whole(answer["value"])
