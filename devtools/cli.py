"""The commands of `dev.py`. A `Problem` ends any of them with one sentence and exit code 2.

`dev.py` needs nothing but Python: it makes `.venv` and then starts this file inside it, with the same arguments. What
is imported here at the top runs without `.venv` and uses the standard library only.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from . import console, doctor, environment, hosts
from .guard import Guarded
from .places import Places
from .problem import Problem, from_os_error
from .suite import PARTS


def main(arguments: Sequence[str], *, inside: bool = False) -> int:
    """Run a command; `inside` says that this is the Python of `.venv`."""
    sys.stdout.reconfigure(errors="replace")  # not every terminal can show what a program prints
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is stopped
    try:
        options = _parser().parse_args(arguments)
        if options.command == "doctor":
            return doctor.run(Places.here())
        return _run(**vars(options)) if inside else _set_up(arguments)
    except Problem as problem:
        found: Problem | None = problem
    except OSError as error:
        found = from_os_error(error)
        if found is None:
            raise
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        return 130
    sys.stderr.write(f"\n{found}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dev.py", description="Set up, run and test MultiGPU for ComfyUI.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="start a real ComfyUI with this pack and show what it does")
    newest = hosts.NEWEST
    run.add_argument("--host", type=hosts.find, default=newest, help=f"ComfyUI version (default: {newest.version})")
    run.add_argument("--serve", action="store_true", help="keep ComfyUI running and print its address")
    run.add_argument("--port", type=int, help="port on this machine (default: a free one)")
    run.add_argument(
        "--simulate", type=_some_devices, default=0, metavar="N", help="run on N simulated GPUs (needs a C++ compiler)"
    )

    test = commands.add_parser("test", help="run the whole test suite")
    test.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"only these: {', '.join(PARTS)}")
    test.add_argument("-k", dest="expression", metavar="EXPRESSION", help="only tests whose names match, as in pytest")

    commands.add_parser("doctor", help="say what is missing on this machine")
    return parser


def _some_devices(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a possible number of GPUs; give a number from 1 to 8")
    return int(text)


def _set_up(arguments: Sequence[str]) -> int:
    places = Places.here()
    console.line("MultiGPU for ComfyUI: development set-up")
    environment.ensure(places)
    with Guarded([places.python, "-m", "devtools.cli", *arguments], cwd=places.root, show=True) as child:
        return child.wait()


def _run(command: str, **options: Any) -> int:
    module = importlib.import_module(".demonstration" if command == "run" else ".suite", __package__)
    return int(module.run(places=Places.here(), **options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], inside=True))
