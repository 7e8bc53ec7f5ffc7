"""Run a Python program on simulated devices, in the same process.

    SIMDEV=cuda:3:6g python tests/sim/serve.py path/to/ComfyUI/main.py --listen 127.0.0.1 ...

SIMDEV is kind, number of devices and memory of each, as `simdev.install_from_text` reads it. Copies take no time,
unless SIMDEV_LINKS says how many bytes per second each link carries.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys


def main() -> None:
    if len(sys.argv) < 2 or not os.environ.get("SIMDEV"):
        sys.exit("usage: SIMDEV=cuda:3:6g python serve.py PROGRAM [ARGUMENTS]")
    import simdev

    try:
        world = simdev.install_from_text(os.environ["SIMDEV"])
    except simdev.NoCompiler as reason:
        sys.exit(str(reason))
    if speed := os.environ.get("SIMDEV_LINKS"):
        for link in itertools.permutations(("cpu", *world.devices), 2):
            world.set_bandwidth(*link, float(speed))
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
