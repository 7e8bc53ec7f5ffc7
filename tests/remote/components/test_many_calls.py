"""Ten thousand calls through real proxies, some of which are made and dropped meanwhile, take no memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import psutil
import torch

from tests.host.workflows import flux, placed
from tests.remote.comfyui import NODE_B
from tests.remote.components.pipe import loaded
from tests.remote.components.studio import Studio
from tests.remote.processes import until

FIRST, CALLS = 2000, 10_000
"""After the first ones, the caches of both processes are full."""
PROXIES = 40
"""How many calls a proxy is used for; there are always two of them, one of a CLIP and one of a VAE."""


def test_many_calls_through_proxies_that_come_and_go_take_no_memory(studio: Studio) -> None:
    studio.forget()
    line, latent = studio.remote.line("node-b"), {"samples": torch.rand(1, 16, 2, 2)}

    def make(kind: str) -> Any:
        """A new proxy of what the other machine has in its cache."""
        place = f"place_{kind}"
        graph = {name: its for name, its in placed(flux(), kind, compute_device="cpu").items() if name in (kind, place)}
        told = line.call("build", kind, graph=graph, link=[place, 0], kind=kind)
        device = loaded("remote.names").parse_remote(NODE_B)
        return loaded("host.remote.proxies").proxy(
            loaded("host.remote.calls").RemoteComponent(line, device, told, None)
        )

    living = [make("clip"), make("vae")]
    seen: list[Any] = [
        living[0].tokenizer.tokenize_with_weights("a house by the sea"),
        living[1].decode(latent["samples"]),
    ]

    def memory(calls: int) -> list[int]:
        """Of both processes, after these calls."""
        for number in range(calls):
            if number % PROXIES == 0:
                which = number // PROXIES % 2
                living[which] = make(("clip", "vae")[which])
            if number % 10:
                assert living[0].tokenizer.tokenize_with_weights("a house by the sea") == seen[0]
            else:
                assert torch.equal(living[1].decode(latent["samples"]), seen[1])
        studio.methods()
        gc.collect()
        assert until(lambda: len(studio.handles()) == len(living))
        return [psutil.Process(number).memory_info().rss for number in (os.getpid(), studio.link.worker.process.pid)]

    before, after = memory(FIRST), memory(CALLS - FIRST)
    assert all(later <= earlier * 1.01 for earlier, later in zip(before, after, strict=True)), (before, after)
