"""What the pack adds to ComfyUI's start: `python benchmarks/import_time.py [--rounds N]`.

Runs in the development environment (`python dev.py test` makes it). In a fresh process per round, after the host's own
modules are there, it imports the pack as ComfyUI does and asks for its nodes. The first round, which compiles, is not
counted. The median of the processor's seconds counts, because other work on the machine does not disturb it: one thread
does it all, so on an idle machine these are the seconds that pass. At most 0.2 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.2

ROUND = """
import asyncio, importlib.util, sys, time
root, tree, frontend = sys.argv[1:4]
sys.argv[1:] = ["--cpu", "--front-end-root", frontend]
sys.path.insert(0, tree)
import comfy.options
comfy.options.enable_args_parsing()
import folder_paths, utils.extra_config, execution, server, nodes, comfy.sd, comfy_api.latest
loop = asyncio.new_event_loop()
server.PromptServer(loop)
started, passed = time.process_time(), time.perf_counter()
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
pack = sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
made = loop.run_until_complete(loop.run_until_complete(pack.comfy_entrypoint()).get_node_list())
for node in made:
    node.GET_SCHEMA()
print("took", len(made), time.process_time() - started, time.perf_counter() - passed)
"""


def measure(tree: Path, cache: str) -> tuple[int, float, float]:
    """Nodes, seconds of the processor and seconds passed, of one round."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", ROUND, str(ROOT), str(tree), cache]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
        env={**environment, "PYTHONPYCACHEPREFIX": cache},
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("took ")]
    if done.returncode or not lines:
        sys.exit(done.stdout + done.stderr)
    return int(lines[-1][1]), float(lines[-1][2]), float(lines[-1][3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--comfyui", type=Path, action="append", help="a ComfyUI folder; default: those of dev.py")
    options = parser.parse_args()
    failed = False
    for tree in options.comfyui or sorted((ROOT / ".dev" / "hosts").iterdir()):
        with tempfile.TemporaryDirectory() as cache:
            rounds = [measure(tree, cache) for _ in range(options.rounds + 1)][1:]
        busy, passed = (statistics.median(round_[column] for round_ in rounds) for column in (1, 2))
        failed |= busy > LIMIT
        took = f"{busy:.3f} s of the processor (at most {LIMIT} s), {passed:.3f} s passed"
        print(f"{tree.name}: {rounds[0][0]} nodes, {took}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
