"""Blocks on their way from the model file to their homes, waited for when they are first used.

threads         read the file, in order of execution, into RAM, or through pinned buffers to a device
one more        pins RAM that has been filled
who uses one    waits for its own bytes (in RAM: until their segment is pinned) while the next blocks are being read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import HostError
from .arena import Arena, Room, Segment
from .file_homes import Pages
from .file_reader import FileReader, is_worth_it
from .homes import HomedBlock, Laid, fill, move_tensor, moved, own_tensors, settle_in
from .lanes import Event, device_module
from .layout import leaves_of, stored_bytes
from .pages import Page, PagedLeaf
from .threads import Threads


@dataclass(slots=True, eq=False)
class Coming:
    """A block on its way. `settle` puts its tensors into the module once all `parts` are done.

    `room` is where it will rest; None for a block that stays on the compute device.
    """

    block: str
    size: int = 0
    room: Room | None = None
    pages: list[Page] = field(default_factory=list)
    parts: list[Future[Event]] = field(default_factory=list)
    settle: Callable[[], None] = lambda: None


class Arrivals:
    """The blocks of one model that are on their way. `compute` is where they will be used."""

    def __init__(self, compute: torch.device) -> None:
        self._compute = compute
        self._reader: FileReader | None = None
        self._pinning: Threads | None = None
        self._coming: dict[str, Coming] = {}
        self._jobs: list[tuple[Coming, PagedLeaf, torch.Tensor]] = []
        self.failed: set[str] = set()
        """The blocks that could not come."""

    def __contains__(self, block: str) -> bool:
        return block in self._coming

    def __len__(self) -> int:
        return len(self._coming)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._coming])

    def send(self, block: str, module: torch.nn.Module, page: Pages) -> None:
        """Have a block read that stays on the compute device, when reading is started. Memory for it is taken now."""
        coming, rooms = Coming(block), []
        for slots, name, tensor in [*own_tensors(module)]:
            its = page(block, name)
            if its is None or not any(map(is_worth_it, its.leaves.values())):
                move_tensor(slots, name, self._compute)
                continue
            coming.pages.append(its)
            with torch.inference_mode(False), torch.no_grad():
                leaves, rebuild = leaves_of(tensor)
                parts = [torch.empty_like(leaf, device=self._compute) for leaf in leaves]
                for number, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
                    paged = its.leaves.get(number)
                    if paged is not None and is_worth_it(paged):
                        self._jobs.append((coming, paged, part.view(-1).view(torch.uint8)))
                    else:
                        part.copy_(leaf)
            rooms.append((slots, name, rebuild, parts))
            coming.size += stored_bytes(tensor)

        def settle() -> None:
            for slots, name, rebuild, parts in rooms:
                slots[name] = moved(slots[name], rebuild(parts))

        coming.settle = settle
        self._coming[block] = coming

    def send_home(self, homed: HomedBlock, laid: Laid, page: Pages) -> None:
        """Have a block read into its room, away from the compute device, when reading is started."""
        coming = Coming(homed.name, homed.room.size, homed.room)

        def read(name: str, number: int, memory: torch.Tensor) -> bool:
            its = page(homed.name, name)
            paged = None if its is None else its.leaves.get(number)
            if its is None or paged is None or not is_worth_it(paged):
                return False
            coming.pages.append(its)
            self._jobs.append((coming, paged, memory))
            return True

        def settle() -> None:
            homed.tensors = settle_in(homed.room, laid)

        fill(homed.room, laid, read)
        coming.settle = settle
        self._coming[homed.name] = coming

    def start(self, arenas: Sequence[Arena]) -> None:
        """Begin to read what was sent, in this order. RAM of the arenas is pinned, each segment when it is full.

        All memory was taken before: that would take longer while threads fill and pin it.
        """
        for coming, leaf, memory in self._jobs:
            if self._reader is None:
                self._reader = FileReader(self._compute)
            coming.parts += self._reader.read(leaf, memory)
        self._jobs.clear()
        for arena, segment in ((its, segment) for its in arenas for segment in its.segments):
            inside = [its for its in self._coming.values() if its.room is not None and its.room.segment is segment]
            if inside and not segment.registered:
                if self._pinning is None:
                    self._pinning = Threads(1, "multigpu-pin")
                parts = [part for coming in inside for part in coming.parts]
                pinned: Future[Event] = self._pinning.submit(_pin, arena, segment, self._compute, parts)
                for coming in inside:
                    coming.parts.append(pinned)

    def is_there(self, block: str) -> bool:
        """Whether the bytes of a block are at its home, away from the compute device: nobody would have to wait."""
        coming = self._coming.get(block)
        return coming is None or all(part.done() and _is_over(part) for part in coming.parts)

    def bring(self, block: str) -> int:
        """Wait for a block. What is queued on the compute device after this call sees its bytes. Returns their number.

        Raises HostError if the file cannot be read, or has changed since it was loaded.
        """
        coming = self._coming[block]
        self.failed.add(block)
        try:
            events = [part.result() for part in coming.parts]
        except OSError as error:
            raise HostError(f"{block} could not be read from its model file: {error}") from None
        for page in coming.pages:
            page.check(block)
        self.failed.discard(block)
        module = device_module(self._compute)
        for event in filter(None, events):
            if coming.room is None:
                module.current_stream(self._compute).wait_event(event)
            else:
                event.synchronize()  # on another device, from where lanes copy on streams of their own
        coming.settle()
        del self._coming[block]
        return coming.size

    def close(self) -> None:
        """Nothing more comes: blocks that have not come stay in the pages of their file."""
        if self._reader is not None:
            self._reader.close()
        if self._pinning is not None:
            self._pinning.close()
        self._reader = self._pinning = None
        self._coming.clear()
        self._jobs.clear()


def _is_over(part: Future[Event]) -> bool:
    if part.exception() is not None:
        return False  # who uses the block is told
    event = part.result()
    return event is None or bool(event.query())


def _pin(arena: Arena, segment: Segment, compute: torch.device, parts: Sequence[Future[Any]]) -> None:
    try:
        for part in parts:  # `concurrent.futures.wait` would not notice that they were cancelled
            part.result()
    except (CancelledError, OSError):
        return  # who uses the blocks is told
    arena.pin(compute, segment)
