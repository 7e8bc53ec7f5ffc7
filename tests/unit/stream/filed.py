"""Models whose weights are pages of a file, without ComfyUI. As a program: such a model under a limit of RAM."""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from pathlib import Path

import torch

from multigpu.plan import CPU, DISK, DeviceId, Placement, Plan, Reason
from multigpu.stream.pages import Page, PagedLeaf, file_stamp
from multigpu.stream.residence import Residence


class Filed(torch.nn.Module):
    """Linear layers whose weights follow each other in a file, and a buffer in each that is not there."""

    def __init__(self, path: Path, count: int, width: int) -> None:
        super().__init__()
        self.width, size = width, 4 * width * width
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(count))
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            descriptor = os.dup(file.fileno())
        stamp = file_stamp(descriptor)
        assert stamp is not None
        self.pages: dict[str, Page] = {}
        for index, layer in enumerate(self.layers):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stored = torch.frombuffer(self._mapping, dtype=torch.float32, count=width**2, offset=index * size)
            layer.weight = torch.nn.Parameter(stored.view(width, width), requires_grad=False)
            layer.register_buffer("scale", torch.tensor(1.0 + index))
            layer.register_forward_hook(lambda layer, _given, result: result * layer.scale)
            weight = layer.weight.detach()
            self.pages[f"layers.{index}"] = Page(weight, {0: PagedLeaf(weight, descriptor, index * size)}, stamp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def page(self, block: str, name: str) -> Page | None:
        page = self.pages[block]
        weight = self.blocks[block]._parameters.get(name)
        return page if weight is not None and weight.data_ptr() == page.tensor.data_ptr() else None

    def rest(self, block: str, name: str) -> bool:
        return self.page(block, name) is not None

    def streamed(self, ring: int, compute: DeviceId = CPU) -> Residence:
        """All layers rest in the file."""
        size = 4 * self.width**2
        placements = tuple(Placement(block, size, DISK, compute, Reason.STREAMED) for block in self.blocks)
        residence = Residence()
        residence.apply(Plan(compute, placements, ring), self.blocks, page=self.page, rest=self.rest)
        return residence


def write(path: Path, count: int, width: int) -> Path:
    """A file of `count` matrices that differ; most of it is a hole that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(4 * count * width**2)
        for index in range(count):
            file.seek(4 * index * width**2)
            file.write(torch.linspace(-1, 1 + index, width).numpy().tobytes())
    return path


def anonymous_bytes() -> int:
    """Of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(path: str, count: str, width: str, limit: str) -> None:
    """Say how much RAM the planner finds, what the model computes, and how many bytes are not pages of files."""
    from multigpu.devices.ram import ram

    assert ram()[0] == int(limit), ram()
    model = Filed(Path(path), int(count), int(width))
    before = anonymous_bytes()
    residence = model.streamed(ring=3 * 4 * int(width) ** 2)
    x = torch.linspace(-1, 1, int(width))
    for _ in range(2):
        result = model(x)
    sys.stdout.write(f"{anonymous_bytes() - before} {result.double().sum().item()}\n")
    residence.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
