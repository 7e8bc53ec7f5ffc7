"""Set up, run and test MultiGPU for ComfyUI. See `python dev.py --help` and CONTRIBUTING.md."""

import sys

OLDEST, NEWEST = (3, 11), (3, 13)


def main():
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        have = "%d.%d" % sys.version_info[:2]  # noqa: UP031  an old Python must be able to read this file
        sys.stderr.write("dev.py needs Python 3.11, 3.12 or 3.13 and this is " + have + "; run it with one of those.\n")
        return 2
    from devtools.cli import main as run_command

    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
