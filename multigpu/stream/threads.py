"""Threads that Python does not wait for when it ends.

It would wait for those of `concurrent.futures` until all that is queued is done: for a whole model file to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Task = tuple[Future[Any], Callable[[], Any]]


class Threads:
    """Do what is submitted, in this order, `count` things at a time."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=f"{name}_{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, do: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        task: Future[_Result] = Future()
        self._tasks.put((task, lambda: do(*arguments)))
        return task

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, do = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  raised where the result is asked for
                future.set_exception(error)
            del task, future, do  # which may hold memory, while the next one is waited for
