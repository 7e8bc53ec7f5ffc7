"""The `multigpu` command. A sub-command is a module with `run(arguments) -> exit code`, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import MultiGPUError
from .terminal import complain, drop_output, put

COMMANDS = {
    "plan": "show how a model's weights would be spread over devices; reads only the file's header",
    "doctor": "check that a ComfyUI has every function that this pack uses",
    "worker": "offer the devices of this machine to ComfyUI on other machines, over Ray",
}
"""Sub-command, which is also the module's name here -> what it does."""

FAILED, WRONG_INPUT = 1, 2
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells report it."""
READER_GONE = 141
"""Whoever read the output has closed it, as `head` does: 128 + SIGPIPE, as shells report it. There is no message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `multigpu COMMAND ...` and return the exit code: 0 when done, or one of those above."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = " ".join(["multigpu", *(name for name in arguments[:1] if name in COMMANDS)])
    try:
        return _run(arguments)
    except MultiGPUError as error:
        complain(command, str(error))
        return WRONG_INPUT if isinstance(error, ValueError) else FAILED
    except KeyboardInterrupt:
        drop_output()
        complain(command, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return READER_GONE


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        put(_usage())
        return 0 if arguments else WRONG_INPUT
    name, *rest = arguments
    if name == "--version":
        put(f"multigpu {__version__}\n")
        return 0
    if name not in COMMANDS:
        complain("multigpu", f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
        return WRONG_INPUT
    return int(import_module(f".{name}", __name__).run(rest))


def _usage() -> str:
    rows = "".join(f"  {name:<10}{what}\n" for name, what in COMMANDS.items())
    return (
        f"usage: python -m multigpu COMMAND ...\n\n{rows}\n`python -m multigpu COMMAND --help` describes one command, "
        "`python -m multigpu --version` prints the version.\n"
        "Run it in the pack's folder. Where pip has installed the pack, `multigpu` is the same command.\n"
    )
