"""What a user waits for: Place Model in mode auto against ComfyUI alone, from loading the file to the last step.

    python benchmarks/time_to_picture.py [--cases flux-16 wan-16-33 ...] [--sides core ours static diffusers]
        [--rounds 3] [--seconds 540] [--json FILE] [--add FILE ...] [--against FILE] [--plot docs/time_to_picture.svg]
        [--small]

Models with random weights in the shapes of Flux-dev, Wan 2.1 14B and Qwen-Image. The number in a case's name is the
card: the GB that a ballast leaves of the GPU. Each case and side has a process of its own, the sides in turns, with
the file in the page cache. Prints all medians, the ratios, and whether each line that must hold does; a line for which
something is missing is printed as not measured, and does not hold. Where there is no NVIDIA GPU, or with `--simulate`,
tiny models on a simulated GPU show that all of it runs, without DynamicVRAM, and their seconds mean nothing.

The prompts of a process, in this order, and what is measured:

    first       loading (and placing) with 4 steps. Of these: `load`, the loader; `place`, the node; `prepare`, from the
                beginning of sampling until the model is called; `first_step`, from there to the end of the first step
    second      10 steps (5 for 33 frames) with other sigmas; its first step, and the mean of the others, `step`
    again       the same with another seed
    change, change_8, off, on
                instead of `again` with a LoRA of rank 32 on every linear from the first prompt on: another one with 4
                steps, yet another with 8, none, and the first one again with 4
    free        VRAM left free between the steps of the second prompt; `free_least`: of all prompts, loading included
    ram_peak    the most RAM that no file backs, pinned RAM included, in all prompts; `ram_first`: in the first prompt
    timed, waited
                a step as timed by the GPU's events, and how long the GPU waited for weights in it
    estimate    seconds per step as estimated when the model was placed
    forecast    the same after the first prompt, before the second one: what is promised for the steps that follow;
                `simulated`: what the planner's simulator says with the times measured in the first prompt

T is the step with all weights resident, core's without ballast. B is the link, measured by each call for each model
file; its median counts. The lines that must hold:

    loading plus four steps, of core's
    second prompt, of its steps
        Nothing but steps takes time: `second` of its first step and the others. Hoisted layers are copied in the first
        step of other sigmas, so that one is longer than the others by design, and counts as it is. The table has the
        quotient by as many others, too.
    second prompt's first step, of max(T, bytes copied in it / B)
        Nothing hides in the first step. The bytes are all that the plan streams, hoisted ones included.
    same prompt with another seed, of its steps
        All steps are alike, and nothing else takes time: `again` of its number of steps times `step`.
    s/step, of core's
    s/step, of max(T, bytes that do not fit / B)
        The bytes are those that the plan streams, less what ours leaves free beyond core: they would have fitted.
        Hoisted ones are not among them. The limit with hoisted ones is printed as well.
    half away, layers computed ahead: s/step, of T
    first prompt with a LoRA, another LoRA with 8 and with 4 steps, of core's; s/step with a LoRA, of without
    VRAM left free in the second prompt beyond core's
    most RAM in all prompts beyond the bytes homed there
    error of the forecast after the first prompt
        By how much it differs from the second prompt's `step`.
    pictures that differ
        In at least one bit: from core's without a LoRA; with one from those of ComfyUI without DynamicVRAM and with all
        weights resident, which computes weights with a LoRA as we do; and when a LoRA comes again.

On a card that holds the whole model (`flux-16-fp8`) all sides tie: it is measured, and only its pictures are judged.

After `--seconds` no process is started. The same command with `--add` and the file of `--json` goes on from there;
with `--rounds 0` it only reports. Files of another GPU, torch or ComfyUI are refused. A model's file is deleted after
its cases, unless `--keep-files`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()
from picture import parts, plot, report, rules  # noqa: E402
from picture.cases import CASES, DEFAULT, SIDES, Case  # noqa: E402

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests" / "gpu"))
import bench_models  # noqa: E402

LONGEST = 300
"""Seconds after which a process is taken for stuck."""
LAST_LINES = 12


def in_process(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """What one process does: it writes a model file and looks at the machine, or measures a case.

    The second is to be held until the process ends.
    """
    (case,) = (CASES[name] for name in options.cases)
    sys.path.append(str(HERE))
    if options.simulate:
        from tests.sim import simdev

        simdev.install_from_text("cuda:1:4g")
    if options.process == "write":
        for size in dict.fromkeys((options.warm, options.size)):
            bench_models.model_file(case.family, size, case.kind)
        return machine(options), None
    path, small = (bench_models.path_of(case.family, size, case.kind) for size in (options.size, options.warm))
    if options.size != "whole":
        case = case.shrunk(options.simulate)
    if options.process == "diffusers":
        from picture import diffusers_side

        imported = time.monotonic()
        result, held = diffusers_side.measure(case, path)
    else:
        import bench_host

        bench_host.start(options.host, dynamic=options.process != "static" and not options.simulate)
        from picture import process

        imported = time.monotonic()
        result, held = process.measure(case, options.process, path, small)
    seconds = {"imports": imported - BEGIN, **result["seconds"]}
    return result | {"seconds": seconds}, held


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on, without starting ComfyUI."""
    import torch
    from streaming import link_speed

    tree = Path(options.host or HERE / ".bundle" / "ComfyUI")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about["host"] = runpy.run_path(str(tree / "comfyui_version.py"))["__version__"]
    return {**about, "link": None if options.simulate else link_speed()}


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def commit() -> str:
    """Of this tree, as git tells it, or as `tests/gpu/bundle.py` has noted it for a machine without git."""
    noted = HERE / ".bundle" / "commit"
    with suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return noted.read_text().strip() if noted.exists() else "unknown"


def child(options: argparse.Namespace, what: str, case: str) -> dict[str, Any]:
    """The answer of a process of its own; if it fails, the last lines of what it said, as `error`."""
    command = [sys.executable, __file__, "--process", what, "--cases", case]
    command += ["--host", options.host] if options.host else []
    command += [f"--{name}" for name in ("small", "simulate") if getattr(options, name)]
    environment = os.environ | CASES[case].environment
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LONGEST} s"}
    if done.returncode == 0:
        with suppress(ValueError, IndexError):
            answer = dict(json.loads(done.stdout.splitlines()[-1]))
            if "seconds" in answer:
                answer["seconds"]["ended"] = time.monotonic() - begin - sum(answer["seconds"].values())
            return answer
    last = (done.stdout + done.stderr).splitlines()[-LAST_LINES:]
    return {"error": "\n".join([*last, f"exit code {done.returncode}"])}


class Run:
    """One call of the benchmark: what it has measured so far, on the disk after each process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.chosen = [CASES[name] for name in options.cases]
        self.needed = {name: side for case in self.chosen for name, side in case.needs.items()}
        earlier = [json.loads(Path(file).read_text()) for file in options.add]
        before = [case for results in earlier for case in results.get("cases", ())]
        self.results: dict[str, Any] = {
            "parts": [part for results in earlier for part in parts.parts_of(results)],
            "machine": {},
            "cases": list(dict.fromkeys([*before, *(options.cases if options.rounds else ())])),
            "rows": [row for results in earlier for row in results["rows"] if "error" not in row],
        }
        self.results["machine"] = parts.machine_of(self.results["parts"])
        command = " ".join(["python", "benchmarks/time_to_picture.py", *sys.argv[1:]])
        date = datetime.date.today().isoformat()
        self.part: dict[str, Any] = {"date": date, "command": command, "commit": commit(), "machine": {}}
        self.links: list[float] = []

    @property
    def over(self) -> bool:
        return self.options.seconds is not None and time.monotonic() - self.begin > self.options.seconds

    def save(self) -> None:
        folder = os.environ.get("OUT")
        for path in filter(None, (self.options.json, folder and os.path.join(folder, "time_to_picture.json"))):
            Path(path).write_text(json.dumps(self.results, indent=1) + "\n")

    def measure(self) -> None:
        cases = [case for case in CASES.values() if case in self.chosen or case.name in self.needed]
        for file in dict.fromkeys((case.family, case.kind) for case in cases):
            with_it = [case for case in cases if (case.family, case.kind) == file]
            if not self.over and any(self._missing(case, self.options.rounds) for case in with_it):
                self._measure_file(with_it)

    def _measure_file(self, cases: list[Case]) -> None:
        path = Path(bench_models.path_of(cases[0].family, self.options.size, cases[0].kind))
        self._delete_files(keep=path)
        if path.exists():
            _into_the_page_cache(path)
        written = child(self.options, "write", cases[0].name)
        if "error" in written:
            print(f"{path} cannot be written:\n{written['error']}", flush=True)
            return
        self._note(written)
        for number in range(self.options.rounds):
            for case in cases:
                for side in self._missing(case, number + 1)[:: -1 if number % 2 else 1]:
                    if self.over:
                        print(f"{self.options.seconds} s are over", flush=True)
                        return
                    row = {"case": case.name, "side": side, "round": number, **child(self.options, side, case.name)}
                    print(row.get("error") or "", json.dumps(row), flush=True)
                    self.results["rows"].append(row)
                    self.save()
        self._delete_files()

    def _note(self, machine: dict[str, Any]) -> None:
        """This call is a part of the results from now on. Ends the run if the parts before are of another machine."""
        if machine["link"] is not None:
            self.links.append(machine["link"])
        self.part["machine"] = machine | {"link": statistics.median(self.links) if self.links else None}
        if self.part not in self.results["parts"]:
            self.results["parts"].append(self.part)
        self.results["machine"] = parts.machine_of(self.results["parts"])
        print(self.results["machine"], flush=True)

    def _missing(self, case: Case, rounds: int) -> list[str]:
        """The sides of a case that have been measured in fewer rounds, failures included.

        ComfyUI alone takes no allocation. What other cases are compared with is measured once.
        """
        sides = dict.fromkeys(self.options.sides if case in self.chosen else (), rounds)
        if case.allocation:
            sides = {side: count for side, count in sides.items() if side == "ours"}
        if case.name in self.needed:
            sides.setdefault(self.needed[case.name], 1)
        done = [row["side"] for row in self.results["rows"] if row["case"] == case.name]
        return [side for side, count in sides.items() if done.count(side) < count]

    def _delete_files(self, keep: Path | None = None) -> None:
        """There is room for one large model on a small disk."""
        sizes = (self.options.warm, self.options.size)
        for each in itertools.product(bench_models.FAMILIES, sizes, bench_models.KINDS):
            path = Path(bench_models.path_of(*each))
            if path != keep and not self.options.keep_files:
                path.unlink(missing_ok=True)


def _into_the_page_cache(path: Path) -> None:
    piece = 256 << 20
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(8) as pool:
        starts = range(0, path.stat().st_size, piece)
        for _ in pool.map(lambda start: os.pread(file.fileno(), piece, start) and None, starts):
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
    parser.add_argument("--process", choices=(*SIDES, "write"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds and not options.process and not options.simulate and not has_cuda():
        print("There is no NVIDIA GPU here: tiny models on a simulated one show that all of it runs.", flush=True)
        options.simulate = True
    options.warm = "tiny" if options.simulate else "small"
    options.size = options.warm if options.simulate or options.small else "whole"
    if options.simulate and options.host is None:
        options.host = str(max((HERE / ".dev" / "hosts").iterdir()))
    if options.process:
        answer, _held = in_process(options)
        print(json.dumps(answer), flush=True)
        os._exit(0)  # giving gigabytes back one by one would take seconds
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
        worse = rules.worse(rules.judge(run.results), rules.judge(before))
        print("\n".join(["", f"Worse than {options.against}:", *(worse or ["nothing"])]))
    return int(bool(worse) or any("error" in row for row in run.results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
