"""Caches of devices that are not there cost nothing; the heap is really given back. Simulated devices show the rest."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from multigpu.devices.caches import all_reserved, cached_bytes, clear_caches, log_given_back
from multigpu.plan import CPU, DeviceId

HEAP = """
import ctypes, psutil
from multigpu.devices.caches import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(64 * 1024) for _ in range(3200)]
for block in blocks:
    ctypes.memset(block, 1, 64 * 1024)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
    libc.free(block)
before = psutil.Process().memory_info().rss
trim_heap()
print(before - psutil.Process().memory_info().rss)
"""


def test_the_cache_of_a_backend_that_is_not_there_cannot_be_emptied() -> None:
    nowhere = DeviceId("nosuch", 0)
    before = all_reserved([nowhere, CPU])
    assert before == {nowhere: None, CPU: 0} and [*map(cached_bytes, before)] == [None, 0]
    clear_caches(before)
    assert log_given_back("test", before) == {CPU: 0}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps a heap that it can trim")
def test_the_heap_is_given_back_to_the_system() -> None:
    root, command = Path(__file__).parents[3], [sys.executable, "-c", HEAP]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 150 * 2**20
