"""What a user waits for: Place Model in mode auto against ComfyUI alone, from loading the file to the last step.

    python benchmarks/time_to_picture.py [--cases flux-16 wan-16-33 ...] [--sides core ours static diffusers]
        [--rounds 3] [--seconds 540] [--json FILE] [--add FILE ...] [--against FILE] [--plot docs/time_to_picture.svg]
        [--small]

Models with random weights in the shapes of Flux-dev, Wan 2.1 14B and Qwen-Image. The number in a case's name is the
card: the GB that a ballast leaves of the GPU. Each case and side has a process of its own, the sides in turns, with
the file in the page cache. Prints all medians, the ratios, and whether each line that must hold does.

Measured are: loading (and placing) with a prompt of 4 steps; a second prompt and its seconds per step; in
`flux-16-lora` the same with a LoRA of rank 32 on every linear of the blocks from the first prompt on, then another one
with 4 steps, yet another with 8, none, and the first one again; the VRAM left free, RAM, pinned RAM, and the pictures'
checksums. T, the step with all weights resident, is core's without ballast. Needs one NVIDIA GPU, or `--simulate`: then
tiny models on a simulated GPU show that all of it runs, without DynamicVRAM, and their seconds mean nothing.

After `--seconds` no process is started. The same command with `--add` and the file of `--json` goes on from there;
with `--rounds 0` it only reports. A model's file is deleted after its cases, unless `--keep-files`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from picture import plot, report
from picture.cases import CASES, DEFAULT, SIDES, Case

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests" / "gpu"))
import bench_models  # noqa: E402

LONGEST = 300
"""Seconds after which a process is taken for stuck."""
LAST_LINES = 12


def in_process(options: argparse.Namespace) -> dict[str, Any]:
    """What one process does: it writes a model file, asks the machine, or measures a case."""
    (case,) = (CASES[name] for name in options.cases)
    if options.process == "write":
        return {size: bench_models.model_file(case.family, size, case.fp8) for size in (options.warm, options.size)}
    if options.simulate:
        sys.path.append(str(HERE))
        from tests.sim import simdev

        simdev.install_from_text("cuda:1:4g")
    path, small = (bench_models.path_of(case.family, size, case.fp8) for size in (options.size, options.warm))
    if options.size != "whole":
        case = case.shrunk(options.simulate)
    if options.process == "diffusers":
        from picture import diffusers_side

        return diffusers_side.measure(case, path)
    import bench_host
    import torch

    bench_host.start(options.host, dynamic=options.process != "static" and not options.simulate)
    if options.process == "machine":
        import comfyui_version
        from streaming import link_speed

        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "host": comfyui_version.__version__}
        return {**about, "link": None if options.simulate else link_speed()}
    from picture import process

    return process.measure(case, options.process, path, small)


def child(options: argparse.Namespace, what: str, case: str) -> dict[str, Any]:
    """The answer of a process of its own; if it fails, the last lines of what it said, as `error`."""
    command = [sys.executable, __file__, "--process", what, "--cases", case]
    command += ["--host", options.host] if options.host else []
    command += [f"--{name}" for name in ("small", "simulate") if getattr(options, name)]
    try:
        hoist = os.environ.get("MULTIGPU_HOIST", "on") if CASES[case].hoist else "off"
        environment = {**os.environ, "MULTIGPU_HOIST": hoist}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LONGEST} s"}
    if done.returncode == 0:
        with suppress(ValueError, IndexError):
            return dict(json.loads(done.stdout.splitlines()[-1]))
    last = (done.stdout + done.stderr).splitlines()[-LAST_LINES:]
    return {"error": "\n".join([*last, f"exit code {done.returncode}"])}


class Run:
    """One call of the benchmark: what it has measured so far, on the disk after each process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        earlier = [json.loads(Path(file).read_text()) for file in options.add]
        self.results: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", "benchmarks/time_to_picture.py", *sys.argv[1:]]),
            "machine": earlier[0]["machine"] if earlier else {},
            "rows": [row for results in earlier for row in results["rows"] if "error" not in row],
        }

    @property
    def over(self) -> bool:
        return self.options.seconds is not None and time.monotonic() - self.begin > self.options.seconds

    def save(self) -> None:
        folder = os.environ.get("OUT")
        for path in filter(None, (self.options.json, folder and os.path.join(folder, "time_to_picture.json"))):
            Path(path).write_text(json.dumps(self.results, indent=1) + "\n")

    def measure(self) -> None:
        chosen = [CASES[name] for name in self.options.cases]
        needed = {case.resident for case in chosen} - {case.name for case in chosen}
        cases = [case for case in CASES.values() if case in chosen or case.name in needed]
        if not self.results["machine"]:
            about = child(self.options, "machine", cases[0].name)
            print(about.get("error") or about, flush=True)
            self.results["machine"] = {} if "error" in about else about
        for file in dict.fromkeys((case.family, case.fp8) for case in cases):
            with_it = [case for case in cases if (case.family, case.fp8) == file]
            if not self.over and any(self._missing(case, needed, self.options.rounds) for case in with_it):
                self._measure_file(with_it, needed)

    def _measure_file(self, cases: list[Case], needed: set[str]) -> None:
        path = Path(bench_models.path_of(cases[0].family, self.options.size, cases[0].fp8))
        self._delete_files(keep=path)
        if path.exists():
            _into_the_page_cache(path)
        written = child(self.options, "write", cases[0].name)
        if "error" in written:
            print(f"{path} cannot be written:\n{written['error']}", flush=True)
            return
        for number in range(self.options.rounds):
            for case in cases:
                for side in self._missing(case, needed, number + 1)[:: -1 if number % 2 else 1]:
                    if self.over:
                        print(f"{self.options.seconds} s are over", flush=True)
                        return
                    row = {"case": case.name, "side": side, "round": number, **child(self.options, side, case.name)}
                    print(row.get("error") or "", json.dumps(row), flush=True)
                    self.results["rows"].append(row)
                    self.save()
        self._delete_files()

    def _missing(self, case: Case, needed: set[str], rounds: int) -> list[str]:
        """The sides of a case that have been measured in fewer rounds, failures included.

        ComfyUI alone takes no allocation. What it draws with all weights resident is compared.
        """
        sides, rounds = (("core",), 1) if case.name in needed else (self.options.sides, rounds)
        sides = [side for side in sides if side == "ours" or not case.allocation]
        done = [row["side"] for row in self.results["rows"] if row["case"] == case.name]
        return [side for side in sides if done.count(side) < rounds]

    def _delete_files(self, keep: Path | None = None) -> None:
        """There is room for one large model on a small disk."""
        sizes = (self.options.warm, self.options.size)
        for each in itertools.product(bench_models.FAMILIES, sizes, (False, True)):
            path = Path(bench_models.path_of(*each))
            if path != keep and not self.options.keep_files:
                path.unlink(missing_ok=True)


def _into_the_page_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        room = bytearray(64 << 20)
        while file.readinto(room):
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*DEFAULT], metavar="CASE", help=", ".join(CASES))
    about = "; ".join(f"{side}: {what}" for side, what in SIDES.items())
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["core", "ours"], help=about)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--add", nargs="+", default=[], metavar="FILE", help="results of earlier calls")
    parser.add_argument("--against", metavar="FILE", help="older results; names what has become worse")
    parser.add_argument("--plot", metavar="FILE", help="writes an SVG")
    parser.add_argument("--host", help="a ComfyUI tree; the one in .bundle if not given")
    parser.add_argument("--keep-files", action="store_true")
    parser.add_argument("--small", action="store_true", help="a few blocks of each model, to try the benchmark")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--process", choices=(*SIDES, "write", "machine"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.warm = "tiny" if options.simulate else "small"
    options.size = options.warm if options.simulate or options.small else "whole"
    if options.simulate and options.host is None:
        options.host = str(max((HERE / ".dev" / "hosts").iterdir()))
    if options.process:
        print(json.dumps(in_process(options)))
        return 0
    run = Run(options)
    if options.rounds:
        run.measure()
    run.save()
    print(report.markdown(run.results))
    if options.plot:
        Path(options.plot).write_text(plot.svg(run.results))
    worse = []
    if options.against:
        before = json.loads(Path(options.against).read_text())
        worse = report.worse(report.judge(run.results), report.judge(before))
        print("\n".join(["", f"Worse than {options.against}:", *(worse or ["nothing"])]))
    return int(bool(worse) or any("error" in row for row in run.results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
