"""What happens when a block is first used: it comes from the model file, or gets its patches, or both.

Blocks on the compute device have a hook for that, which is removed then. Those away from it are asked for by the
streamer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .arena import Arena
from .arrivals import Arrivals
from .file_homes import Pages
from .homes import HomedBlock, Laid, own_tensors
from .layout import copy_to

Passing = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""From a block and its tensors on the compute device to those of them that have patches, with them."""


@dataclass(slots=True)
class Told:
    """Whom to tell."""

    passing: Passing = lambda block, tensors: {}
    """For a block that rests in the file it is called before each use. For one that awaits patches it is called once,
    and then it also has to rewrite the block with them."""
    came: Callable[[str, int], None] = lambda block, count: None
    """Called with a block from the model file, and its bytes, when it has come."""
    settled: Callable[[], None] = lambda: None
    """Called once, when all blocks have come, and have their patches."""


class Homes(Protocol):
    """Where the blocks of the model rest."""

    @property
    def told(self) -> Told: ...

    def homed(self, block: str) -> HomedBlock | None:
        """A block away from the compute device."""

    def changing(self) -> None:
        """Bytes at home are about to change."""

    def changed(self) -> None: ...

    def warm_up(self) -> None:
        """A pass is not like the others: patches are computed in it."""

    def complete(self) -> None:
        """Everything has come."""


class FirstUses:
    """The blocks of one model, loaded by one plan, of which something is still due."""

    def __init__(self, compute: torch.device, homes: Homes) -> None:
        self._compute, self._homes = compute, homes
        self._arrivals = Arrivals(compute)
        self._awaiting: set[str] = set()
        self._hooks: dict[str, tuple[torch.nn.Module, Any]] = {}
        self._is_settled = False

    @property
    def coming(self) -> int:
        """How many blocks are on their way."""
        return len(self._arrivals)

    @property
    def outstanding(self) -> bool:
        """Whether blocks are still to come, or to get their patches."""
        return bool(self.coming or self._awaiting)

    @property
    def failed(self) -> bool:
        """Whether a block could not come."""
        return bool(self._arrivals.failed)

    def is_there(self, block: str) -> bool:
        """Whether a block away from the compute device can be copied from its home without waiting."""
        return self._arrivals.is_there(block)

    def is_coming(self, block: str) -> bool:
        return block in self._arrivals

    # -- what is due ----------------------------------------------------------------------------------------------

    def send(self, block: str, module: torch.nn.Module, page: Pages) -> None:
        """Have a block read that stays on the compute device, when reading is started. Memory for it is taken now."""
        self._arrivals.send(block, module, page)
        self._watch(block, module)

    def send_home(self, homed: HomedBlock, laid: Laid, page: Pages) -> None:
        """Have a block read into its room, away from the compute device, when reading is started."""
        homed.tensors = [its for _, its in laid]
        self._arrivals.send_home(homed, laid, page)

    def start(self, arenas: Sequence[Arena]) -> None:
        """Begin to read what was sent, in this order."""
        self._is_settled = False
        self._arrivals.start(arenas)

    def await_patches(self, blocks: Collection[str], modules: Mapping[str, torch.nn.Module]) -> None:
        """These blocks get patches when they are first used, and no others."""
        for block in self._awaiting - {*blocks}:
            self._awaits_nothing(block)
        self._is_settled &= not blocks
        for block in blocks:
            self._awaiting.add(block)
            homed = self._homes.homed(block)
            if homed is not None:
                homed.awaits = True
            else:
                self._watch(block, modules[block])

    def _awaits_nothing(self, block: str) -> None:
        self._awaiting.discard(block)
        homed = self._homes.homed(block)
        if homed is not None:
            homed.awaits = False

    # -- what happens ---------------------------------------------------------------------------------------------

    def bring(self, block: str) -> None:
        """Wait for a block that is coming. Raises HostError if its file cannot be read, or has changed."""
        self._homes.told.came(block, self._arrivals.bring(block))

    def passing(self, block: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Those of a block's tensors on the compute device that have patches, with them."""
        return self._homes.told.passing(block, tensors)

    def has_patches(self, block: str) -> None:
        """A block has got the patches that it has awaited."""
        self._awaits_nothing(block)
        self._homes.warm_up()

    def look(self) -> None:
        """Between uses of blocks: if everything has come, say so."""
        if not self._is_settled and not self.outstanding:
            self._arrivals.close()
            self._homes.complete()
            self._homes.told.settled()
            self._is_settled = True

    def finish(self) -> None:
        """Let everything come now that is still to come, and all patches be computed."""
        for block in self._arrivals:
            self.bring(block)
        if self._awaiting:
            self._homes.changing()
            for block in [*self._awaiting]:
                homed = self._homes.homed(block)
                module = self._hooks[block][0] if homed is None else homed.module
                tensors = {name: tensor for _, name, tensor in own_tensors(module)}
                if homed is not None:
                    tensors = {name: copy_to(tensor, self._compute) for name, tensor in tensors.items()}
                self.passing(block, tensors)
                self.has_patches(block)
            self._homes.changed()
        self._unhook()
        self.look()

    def close(self) -> None:
        """Nothing comes any more. Blocks that have not come stay in the pages of their file, without patches."""
        self._arrivals.close()
        self._unhook()
        for block in [*self._awaiting]:
            self._awaits_nothing(block)

    def _watch(self, block: str, module: torch.nn.Module) -> None:
        """A block on the compute device comes, and gets its patches, when it is first used."""
        if block not in self._hooks:
            hook = module.register_forward_pre_hook(
                lambda its, given: self._first_use(block) if its is module else None,  # not for a copy of the module
                prepend=True,
            )
            self._hooks[block] = module, hook

    def _first_use(self, block: str) -> None:
        module, hook = self._hooks[block]
        if self.is_coming(block):
            self.bring(block)
        if block in self._awaiting:
            self.passing(block, {name: tensor for _, name, tensor in own_tensors(module)})
            self.has_patches(block)
        del self._hooks[block]
        hook.remove()
        self.look()

    def _unhook(self) -> None:
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
