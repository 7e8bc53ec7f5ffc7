"""Simulated accelerators: several devices, streams, links and a race detector on a machine without any.

`simdev.install("cuda", 3, capacity)` makes torch present `cuda:0..2`; see docs/simulated-devices.md.
"""

from .builder import NoCompiler, build
from .install import CPU_LIMIT, HOST_FLAGS, GiB, current, install, install_from_text
from .world import Copy, World

__all__ = ["CPU_LIMIT", "Copy", "GiB", "HOST_FLAGS", "NoCompiler", "World", "build", "current", "install",
           "install_from_text"]  # fmt: skip
