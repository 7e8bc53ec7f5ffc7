"""The `multigpu` command. A sub-command is a module with `run(arguments) -> exit code`, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import MultiGPUError

COMMANDS = {
    "plan": "show where a model's blocks would rest, from the file's header alone",
    "doctor": "compare a ComfyUI with what this pack expects of it",
}
"""Sub-command, which is also the module's name here -> what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `multigpu COMMAND ...`. Exit codes: 0 done, 1 something failed, 2 the input cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        sys.stderr.write(f"multigpu: there is no command {name!r}; there is {', '.join(COMMANDS)}\n")
        return 2
    try:
        return int(import_module(f".{name}", __name__).run(rest))
    except MultiGPUError as error:
        sys.stderr.write(f"multigpu {name}: {error}\n")
        return 2 if isinstance(error, ValueError) else 1


def _usage() -> str:
    rows = "".join(f"  {name:<10}{what}\n" for name, what in COMMANDS.items())
    return f"usage: multigpu COMMAND ...\n\n{rows}\n`multigpu COMMAND --help` says more about one of them.\n"
