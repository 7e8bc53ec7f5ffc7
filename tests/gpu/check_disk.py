"""Weights that stay in the model file, on a real GPU with DynamicVRAM: bit-identical, and without RAM of their own.

    python tests/gpu/check_disk.py [--host TREE] [--card 8] [--small] [--only strings limit]

First by strings, then `auto` on a GPU of which a ballast leaves `--card` GB, in a process of its own that a control
group limits to half the model's bytes of RAM (`ram_limit.py`), with a file that is not in the page cache; it compares
with what this one has computed. Half of a small model is less than Python needs: the limit needs the whole one.
Prints one line per check and exits 1 if any failed, or if no such group can be made: then nothing is proven.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import bench_host as host
import torch
from check_engine import Checks, lora
from ram_limit import CannotLimit, ram_limit

GB = 1e9


class Peak:
    """The most anonymous bytes of this process at any moment of a `with`, beyond those at its beginning."""

    def __enter__(self) -> Peak:
        self._before, self.bytes, self._over = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.bytes = max(self.bytes, _anonymous() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def check_placed(check: Checks, name: str, placed: Any, forward: host.Forward, want: torch.Tensor) -> None:
    from multigpu.plan import CPU, DISK, explain

    with Peak() as peak:
        host.load_on_device(placed)
        same = sum(torch.equal(forward(placed), want) for _ in range(5))
    plan = placed.placed.states.of(placed).residence.plan  # the one in force
    homed = plan.bytes_on(CPU)
    check(f"{name}: bit-identical", same == 5, explain.one_line(plan))
    check(f"{name}: weights are on disk", plan.bytes_on(DISK) > 0)
    check(f"{name}: RAM", peak.bytes <= homed + GB, f"{peak.bytes / GB:.2f} for {homed / GB:.2f} GB homed there")
    seconds, expected = forward.seconds(placed), plan.forecast.step if plan.forecast else 0.0
    read = plan.bytes_on(DISK) / seconds / GB
    print(f"       {seconds:.3f} s a step, {expected:.3f} were expected; {read:.1f} GB/s from the file", flush=True)


def by_strings(check: Checks, patcher: Any, forward: host.Forward, want: torch.Tensor) -> None:
    for text in ("cuda:0,40%;disk,*", "cuda:0,30%;cpu,30%;disk,*", "disk,*"):
        host.unload()
        placed = host.place(patcher, text)
        check_placed(check, text, placed, forward, want)
    host.unload()
    in_ram = lora(host.place(patcher, "cuda:0,40%;cpu,*"), 0.7)
    host.load_on_device(in_ram)
    patched = forward(in_ram)
    del in_ram
    host.unload()
    check_placed(check, "with a LoRA", lora(host.place(patcher, "cuda:0,40%;disk,*"), 0.7), forward, patched)


def limited(check: Checks, path: str, forward: host.Forward, card: float, want: torch.Tensor) -> None:
    """In the process whose RAM is limited."""
    from multigpu.devices.ram import ram

    total, free = ram()
    check(
        "the limit of RAM is known", total <= os.path.getsize(path) // 2, f"{free / GB:.1f} of {total / GB:.1f} GB free"
    )
    ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - int(card * GB)), dtype=torch.uint8, device="cuda:0")
    placed = host.place(host.load(path))
    check_placed(check, f"auto, {card} GB card, RAM for half of the model", placed, forward, want)
    del ballast


def out_of_the_page_cache(path: str) -> int:
    """Drop what the page cache has of a file, and return how many bytes of it are there all the same."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    resident = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    begin = ctypes.c_char.from_buffer(pages)
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(begin), ctypes.c_size_t(len(pages)), resident) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in bytes(resident)) * mmap.PAGESIZE


def under_a_limit(check: Checks, path: str, want: torch.Tensor, arguments: list[str]) -> None:
    """The file is dropped from the page cache first: a group is charged for the pages that it reads itself."""
    file = f"{path}.want"
    torch.save(want.cpu(), file)
    name = "auto under a limit of RAM"
    try:
        left = out_of_the_page_cache(path)
        check("the file is not in the page cache", left < GB, f"{left / GB:.2f} GB are")
        with ram_limit(os.path.getsize(path) // 2) as limit:
            code = limit.run([sys.executable, __file__, *arguments, "--limited", file])
            check(name, code == 0, f"exit code {code}; {limit.report()}")
    except CannotLimit as reason:
        check(name, False, f"not proven: {reason}")
    finally:
        os.remove(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host")
    parser.add_argument("--card", type=float, default=8)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("strings", "limit"), default=["strings", "limit"])
    parser.add_argument("--limited", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = sys.argv[1:]
    host.start(options.host, dynamic=True)
    path = host.flux_file("small" if options.small else "whole")
    forward = host.Forward(torch.device("cuda:0"))
    check = Checks()
    host.warm_up(host.flux_file("small"), forward)
    if options.limited:
        limited(check, path, forward, options.card, torch.load(options.limited).to("cuda:0"))
        return int(check.failed > 0)
    patcher = host.load(path)
    host.load_on_device(patcher)
    forward(patcher)
    want = forward(patcher)
    if "strings" in options.only:
        by_strings(check, patcher, forward, want)
    del patcher
    host.unload()
    if "limit" in options.only:
        under_a_limit(check, path, want, arguments)
    print(f"{check.failed} failed")
    return int(check.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
