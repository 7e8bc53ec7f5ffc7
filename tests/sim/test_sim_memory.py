"""Memory that runs out, is counted, and is poisoned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MiB = 1024**2
GiB = 1024**3


def test_out_of_memory_at_the_limit(sim):
    sim.limit(sim.device(1), MiB)
    kept = torch.zeros(1000, device=sim.device(1))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4194304 bytes"):
        torch.empty(MiB, device=sim.device(1))
    torch.empty(MiB, device=sim.device(0))  # only the limited device is full
    assert torch.get_device_module(sim.kind).memory_stats(sim.device(1))["num_ooms"] == 1
    assert kept.sum().item() == 0


def test_results_of_operations_count_too(sim):
    x = torch.ones(1000, 100, device=sim.device(0))
    sim.limit(sim.device(0), sim.allocated(0) + 100_000)
    with pytest.raises(torch.OutOfMemoryError):
        x @ x.t()


def test_freed_memory_can_be_used_again(sim):
    sim.limit(sim.device(0), 2 * MiB)
    for _ in range(10):
        torch.zeros(MiB + 1000, dtype=torch.uint8, device=sim.device(0))
    assert sim.peak(0) < 2 * MiB


def test_counters(sim):
    module = torch.get_device_module(sim.kind)
    base = sim.allocated(1)
    x = torch.zeros(1000, device=sim.device(1))  # 4000 bytes, rounded up to 4096
    y = torch.zeros(100_000, device=sim.device(1))
    assert sim.allocated(1) - base == 4096 + 400_384
    assert module.memory_allocated(1) == sim.allocated(1)
    del y
    assert sim.allocated(1) - base == 4096
    assert sim.peak(1) - base == 4096 + 400_384 == module.max_memory_allocated(1) - base
    assert module.memory_reserved(1) - base == 4096 + 400_384
    free, total = module.mem_get_info(sim.device(1))
    assert (free, total) == (GiB - module.memory_reserved(1), GiB)
    module.empty_cache()
    assert module.memory_reserved(1) == sim.allocated(1) == sim.reserved(1)
    module.reset_peak_memory_stats(1)
    assert sim.peak(1) == sim.allocated(1)
    stats = module.memory_stats(sim.device(1))
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.all.current"] == sim.allocated(1)
    assert stats["reserved_bytes.all.current"] == sim.reserved(1)
    assert x.sum().item() == 0


def test_memory_of_other_processes(sim):
    module = torch.get_device_module(sim.kind)
    free, _ = module.mem_get_info(sim.device(2))
    sim.occupy(sim.device(2), GiB - 4 * MiB)
    assert module.mem_get_info(sim.device(2))[0] == free - (GiB - 4 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * MiB, dtype=torch.uint8, device=sim.device(2))


def test_reset_restores_limits_and_counters(sim):
    sim.limit(sim.device(0), MiB)
    torch.ones(4).to(sim.device(0))
    sim.reset()
    assert torch.get_device_module(sim.kind).mem_get_info(sim.device(0))[1] == GiB
    assert sim.moved("cpu", sim.device(0)) == 0
    assert sim.peak(0) == sim.allocated(0)


def test_fresh_memory_is_poisoned(sim):
    assert torch.isnan(torch.empty(8, device=sim.device(0))).all()
    assert torch.isnan(torch.empty(8, dtype=torch.bfloat16, device=sim.device(0))).all()


def test_freed_memory_is_poisoned(sim):
    """A copy queued on a stream which the allocator was not told about reads what is there by then: garbage."""
    module = torch.get_device_module(sim.kind)
    side = module.Stream(sim.device(0))
    x = torch.ones(4, device=sim.device(0))
    target = torch.zeros(4, device=sim.device(0))
    side.wait_stream(module.current_stream(sim.device(0)))
    with module.stream(side):
        target.copy_(x, non_blocking=True)
    del x
    side.synchronize()
    assert torch.isnan(target).all()
    assert [race.kind for race in sim.take_races()] == ["missing record_stream"]


def test_pinned_tensors_are_rounded_up(sim):
    before = sim.pinned_bytes()
    pinned = torch.empty(3 * MiB, dtype=torch.uint8, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[MiB:].is_pinned()
    assert sim.pinned_bytes() - before == 4 * MiB
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    del pinned
    assert sim.pinned_bytes() == before


def test_registered_memory_is_pinned_as_it_is(sim):
    before = sim.pinned_bytes()
    arena = torch.zeros(3 * MiB, dtype=torch.uint8)
    assert sim.register_host(arena) == 0
    assert arena.is_pinned()
    assert arena[MiB:].is_pinned()
    assert sim.pinned_bytes() - before == 3 * MiB
    assert sim.register_host(arena[512:1536]) == 712  # already registered
    assert sim.unregister_host(arena[512:]) == 713  # not the start of a registered range
    assert sim.unregister_host(arena) == 0
    assert not arena.is_pinned()
    assert sim.unregister_host(arena) == 713
    assert sim.pinned_bytes() == before


@pytest.mark.skipif(not os.environ.get("SIMDEV", "cuda").startswith("cuda"), reason="cudaHostRegister is CUDA's")
def test_the_cuda_runtime_registers(sim):
    runtime = torch.cuda.cudart()
    arena = torch.zeros(MiB, dtype=torch.uint8)
    assert runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 1) == 0
    assert arena.is_pinned()
    assert runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 1) == 712
    with pytest.raises(RuntimeError, match="CUDA error 712 of an earlier call"):
        torch.zeros(1, device=sim.device(0))
    torch.zeros(1, device=sim.device(0))
    assert runtime.cudaHostUnregister(arena.data_ptr()) == 0
    assert not arena.is_pinned()


def test_names_of_devices_are_checked(sim):
    with pytest.raises(ValueError, match=f"'{sim.kind}:5' is not a device of this simulation: use one of {sim.kind}:0"):
        sim.peak(f"{sim.kind}:5")
    with pytest.raises(ValueError, match="cpu"):
        sim.moved("cpu", f"{sim.kind}:5")
    with pytest.raises(ValueError, match=sim.kind):
        sim.limit("cpu", GiB)


CONTEXTS = """
import sys, torch
from tests.sim import simdev
world = simdev.install("cuda", 4)
there = lambda: [index for index in range(4) if world.has_context(index)]
assert [torch._C._cuda_hasPrimaryContext(index) for index in range(4)] == [False] * 4
for index in range(4):
    torch.cuda.get_device_properties(index), torch.cuda.memory_stats(index), torch.cuda.memory_allocated(index)
torch.cuda.current_device(), torch.cuda.can_device_access_peer(0, 1), torch.cuda.manual_seed_all(1)
assert there() == []
torch.empty(1, device="cuda:3")
assert there() == [3] and torch.cuda.current_device() == 0
torch.cuda.mem_get_info(1)
assert there() == [1, 3]
with torch.cuda.device(2):
    pass
assert there() == [1, 2, 3]
torch.cuda.synchronize(0)
assert there() == [0, 1, 2, 3] == [index for index in range(4) if torch._C._cuda_hasPrimaryContext(index)]
"""


@pytest.mark.skipif(not os.environ.get("SIMDEV", "cuda").startswith("cuda"), reason="contexts are CUDA's")
def test_a_context_is_made_when_a_device_is_first_used_or_asked_for_its_free_memory():
    """In a process of its own: contexts are not given up. As CUDA 12 and torch do it."""
    subprocess.run([sys.executable, "-c", CONTEXTS], check=True, cwd=Path(__file__).parents[2])
