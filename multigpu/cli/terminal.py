"""Where the commands write: results to standard output, one line per problem to standard error.

If one of them fails (a pipe whose reader has gone, a full disk, an ASCII-only terminal, a closed output), a command
ends with its exit code and at most one line about it, never with a traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import NoReturn

from ..errors import InputError, OutputError

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Parser(argparse.ArgumentParser):
    """Reads a command line. What is wrong with it is raised as `InputError`, in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` lists what can be given")

    def print_help(self, file: object = None) -> None:
        put(self.format_help())


def put(text: str) -> None:
    """Write a result, whole. What the encoding of the output lacks is written as an escape such as \\u4e2d.

    Raises `OutputError` if it cannot be written, `BrokenPipeError` if its reader has gone.
    """
    output = sys.stdout
    if output is None:
        raise OutputError("the result cannot be written: standard output is closed")
    left = memoryview(text.encode(output.encoding, "backslashreplace"))
    try:
        while left:  # without a buffer (PYTHONUNBUFFERED), what a single call does not write would be lost
            left = left[output.buffer.write(left) :]
        output.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise OutputError(f"the result cannot be written: {error.strerror or error}") from None


def complain(command: str, sentence: str) -> None:
    """Write one line to standard error, if there is one."""
    try:
        sys.stderr.write(f"{command}: {one_line(sentence)}\n")
        sys.stderr.flush()
    except (AttributeError, OSError):
        return


def one_line(text: str) -> str:
    """The text with line breaks and other control characters as escapes, as file names may have them."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def drop_output() -> None:
    """Discard what is still to be written: Python would try again to write it at exit, and fail or hang."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (AttributeError, OSError, ValueError):  # not a file: nothing is written later
        return
