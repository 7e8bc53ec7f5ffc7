"""Blocks whose home is the model file: nothing is copied, the module keeps the tensors that are pages of the file.

In the ring such a block has the same form as any other. What is not in the pages (buffers, and the scales of quantised
weights) comes first, from RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from .arena import Arena, Room
from .homes import HomedBlock, HomedTensor, Laid, fill, lay_out_block, own_tensors, settle_in
from .layout import align, leaves_of
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
    layouts = {block: _lay_out(module, found[block]) for block, module in blocks.items()}
    rooms = arena([size for _, _, size in layouts.values() if size])
    for block, module in blocks.items():
        laid, in_pages, size = layouts.pop(block)
        room = rooms.room(size) if size else Room(0, rooms.device)
        fill(room, laid)
        tensors = settle_in(room, laid)
        for tensor, homed in in_pages:
            _fill_rest(room, tensor, homed, found[block][homed.name])
            homed.stay(tensor)
        yield HomedBlock(block, module, room, [*tensors, *(homed for _, homed in in_pages)], found[block])


def _lay_out(module: torch.nn.Module, pages: Mapping[str, Page]) -> tuple[Laid, Laid, int]:
    """Where each tensor goes: those outside of the pages, those in them, and the size of the room.

    First comes what is in the room, the leaves of weights that are not in the pages included; the others follow.
    """
    laid, size = lay_out_block(module, without=pages)
    in_pages, _ = lay_out_block(module, without=[homed.name for _, homed in laid])
    size = _move(in_pages, pages, size, inside=False)
    _move(in_pages, pages, size, inside=True)
    return laid, in_pages, size


def _fill_rest(room: Room, tensor: torch.Tensor, homed: HomedTensor, page: Page) -> None:
    """Copy the leaves of a weight that are not in its pages."""
    with torch.inference_mode(False), torch.no_grad():
        for number, (leaf, source) in enumerate(zip(homed.leaves, leaves_of(tensor)[0], strict=True)):
            if number not in page.leaves:
                leaf.view(room.flat.view(leaf.dtype), 0).copy_(source)


def _move(laid: Laid, pages: Mapping[str, Page], start: int, *, inside: bool) -> int:
    """Put the leaves that are in the pages, or those that are not, one after another from `start` on."""
    for _, homed in laid:
        leaves = [*homed.leaves]
        for number, leaf in enumerate(leaves):
            if (number in pages[homed.name].leaves) == inside:
                leaves[number] = replace(leaf, offset=start)
                start += align(leaf.nbytes)
        homed.leaves = leaves
    return start
