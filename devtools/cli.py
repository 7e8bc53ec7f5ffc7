"""The commands of `dev.py`. A `Problem` ends any of them with one sentence and exit code 2."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from . import demonstration, doctor, hosts, suite
from .console import Console
from .places import Places
from .problem import Problem, from_os_error


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)  # so that what was started is stopped
    try:
        return int(options.command(options))
    except Problem as problem:
        return _say(problem)
    except OSError as error:
        known = from_os_error(error)
        if known is None:
            raise
        return _say(known)
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        return 130


def _say(problem: Problem) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"\n{problem}\n")
    return 2


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dev.py", description="Set up, run and test MultiGPU for ComfyUI.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="start a real ComfyUI with this pack and show what it does")
    run.add_argument(
        "--host", default=hosts.NEWEST.version, metavar="VERSION", help="ComfyUI version (default: %(default)s)"
    )
    run.add_argument("--serve", action="store_true", help="keep ComfyUI running and print its address")
    run.add_argument("--port", type=int, help="port on this machine (default: a free one)")
    run.add_argument(
        "--simulate", type=_some_devices, default=0, metavar="N", help="run on N simulated GPUs (needs a C++ compiler)"
    )
    run.set_defaults(command=_run)

    test = commands.add_parser("test", help="run the whole test suite")
    test.add_argument(
        "--only", nargs="+", choices=suite.PARTS, metavar="PART", help=f"only these: {', '.join(suite.PARTS)}"
    )
    test.add_argument("-k", dest="expression", metavar="EXPRESSION", help="only tests whose names match, as in pytest")
    test.set_defaults(command=_test)

    check = commands.add_parser("doctor", help="say what is missing on this machine")
    check.set_defaults(command=_doctor)
    return parser


def _some_devices(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a possible number of GPUs; give a number from 1 to 8")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    host = hosts.find(options.host)
    return demonstration.run(
        host, Places.here(), Console(), serve=options.serve, port=options.port, simulate=options.simulate
    )


def _test(options: argparse.Namespace) -> int:
    return suite.run(Places.here(), Console(), only=options.only, expression=options.expression)


def _doctor(_: argparse.Namespace) -> int:
    return doctor.run(Places.here(), Console())
