"""Counting what really rests where."""

from __future__ import annotations

from collections import Counter

import torch

from .layout import leaves_of


def bytes_by_device(module: torch.nn.Module) -> dict[torch.device, int]:
    """Bytes of all parameters and buffers of `module` by device; memory that several of them share counts once."""
    seen: set[tuple[torch.device, int]] = set()
    count: Counter[torch.device] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        for leaf in leaves_of(tensor)[0]:
            where = (leaf.device, leaf.data_ptr())
            if leaf.nbytes and where not in seen:
                seen.add(where)
                count[leaf.device] += leaf.nbytes
    return dict(count)
