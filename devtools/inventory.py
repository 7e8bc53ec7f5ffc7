"""Looks for damage in a virtual environment. Run as a script by its own Python.

Prints the first file of an installed package that is missing and ends with 1; says nothing and ends with 0 when all are
there. Compiled bytecode does not count: Python makes it anew.
"""

from __future__ import annotations

import csv
import os
import sys
import sysconfig


def missing() -> str | None:
    if sys.prefix == sys.base_prefix:
        return "pyvenv.cfg"
    packages = sysconfig.get_paths()["purelib"]
    for name in sorted(os.listdir(packages)):
        record = os.path.join(name, "RECORD")
        if not name.endswith(".dist-info"):
            continue
        if not os.path.exists(os.path.join(packages, record)):
            return record
        with open(os.path.join(packages, record), encoding="utf-8", newline="") as file:
            for path, *_ in csv.reader(file):
                if not path.endswith(".pyc") and not os.path.exists(os.path.join(packages, path)):
                    return path
    return None


if __name__ == "__main__":
    if damage := missing():
        sys.exit(damage)
