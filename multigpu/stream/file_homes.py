"""Blocks whose home is the model file: nothing is copied, the module keeps the tensors that are pages of the file.

In the ring such a block has the same form as any other. Tensors that are no pages (buffers) come first, from RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from .arena import Arena, Room
from .homes import HomedBlock, fill, lay_out_block, own_tensors, settle_in
from .pages import Page

Pages = Callable[[str, str], Page | None]
"""The page that a tensor, given by block and name, is in; None for one that is elsewhere."""

Rest = Callable[[str, str], bool]
"""Lets a tensor, given by block and name, rest in its page, if it has one with its bytes; whether it does now."""


def rest_in_file(
    blocks: Mapping[str, torch.nn.Module], page: Pages, rest: Rest, arena: Callable[[list[int]], Arena]
) -> Iterator[HomedBlock]:
    """Let blocks rest in their file, one at a time. `arena` gives memory for their tensors that cannot."""
    found: dict[str, dict[str, Page]] = {}
    for block, module in blocks.items():
        names = [name for _, name, _ in own_tensors(module) if rest(block, name)]
        found[block] = {name: its for name in names if (its := page(block, name)) is not None}
    beside = {block: lay_out_block(blocks[block], without=found[block]) for block in blocks}
    rooms = arena([size for _, size in beside.values() if size])
    for block, module in blocks.items():
        laid, size = beside.pop(block)
        room = rooms.room(size) if size else Room(0, rooms.device)
        in_pages, _ = lay_out_block(module, without=[homed.name for _, homed in laid], start=size)
        fill(room, laid)
        tensors = settle_in(room, laid)
        for tensor, homed in in_pages:
            homed.stay(tensor)
        yield HomedBlock(block, module, room, [*tensors, *(homed for _, homed in in_pages)], found[block])
