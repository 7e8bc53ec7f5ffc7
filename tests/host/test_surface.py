"""Every row of the surface is looked at: what is renamed, removed or re-ordered in the host is noticed and named."""

from __future__ import annotations

import subprocess
import sys

from devtools.hosts import Host
from devtools.places import Places

MUTATE = """
import inspect, sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
root, tree = sys.argv[1:3]
sys.path.insert(0, root)
from multigpu.host import comfyui_tree
comfyui_tree.enter(Path(tree))
import comfy.clip_vision, comfy.controlnet, comfy.sd, nodes, server
from multigpu.host.capabilities import probe
from multigpu.host.surface import SURFACE

def owner_of(row):
    '''The object that has the last name of the path, that name, and whether only objects of the class have it.'''
    owner, names = import_module(row.module), row.path.split(".")
    for number, name in enumerate(names[:-1]):
        inner = getattr(owner, name, None)
        if inner is None:
            return owner, names[number:], True
        owner = inner
    return owner, names[-1:], not hasattr(owner, names[-1])

@contextmanager
def without(row):
    '''Take a symbol away wherever its owner has it: its value, its annotation, its assignment in __init__.'''
    owner, names, _ = owner_of(row)
    name, undo = names[-1], []
    for base in getattr(owner, "__mro__", [owner]):
        start, notes = vars(base).get("__init__", base), vars(base).get("__annotations__", {})
        code = getattr(start, "__code__", None)
        if name in notes:
            undo.append(partial(notes.__setitem__, name, notes.pop(name)))
        if name in vars(base):
            undo.append(partial(setattr, base, name, vars(base)[name]))
            delattr(base, name)
        if code is not None and name in code.co_names:
            start.__code__ = code.replace(co_names=tuple(n + "_" if n == name else n for n in code.co_names))
            undo.append(partial(setattr, start, "__code__", code))
    assert undo, row.name
    yield
    for step in undo:
        step()

@contextmanager
def renamed_parameter(row, change):
    owner, names, _ = owner_of(row)
    found = getattr(owner, names[-1])
    function = inspect.unwrap(found.__init__ if isinstance(found, type) else getattr(found, "__func__", found))
    code = function.__code__
    function.__code__ = code.replace(co_varnames=tuple(change([*code.co_varnames])))
    yield
    function.__code__ = code

def off(capabilities):
    return {name for name, _ in capabilities.features_off()}

def check(row, what, expected):
    after = probe()
    mine = next(found.problem for found in after.findings if found.symbol is row)
    assert row.name in mine, (row.name, what, mine)
    assert off(after) == expected, (row.name, what, off(after), expected)

assert off(probe()) == set(), probe().summary()
count = 0
for row in SURFACE:
    inside = [other for other in SURFACE if other.module == row.module and (
        other.path == row.path or other.path.startswith(row.path + "."))]
    owner, names, of_objects = owner_of(row)
    if of_objects:  # another attribute of the same name, set by the same __init__
        inside += [other for other in SURFACE if owner_of(other)[0] is owner and owner_of(other)[2]
                   and names[-1] in owner_of(other)[1]]
    with without(row):
        check(row, "removed", {other.feature.value for other in inside})
    count += 1
    for name in (*row.positional, *row.keywords):
        with renamed_parameter(row, lambda given: [n + "_" if n == name else n for n in given]):
            check(row, f"parameter {name} renamed", {row.feature.value})
        count += 1
    if len(row.positional) > 1:
        first, second = row.positional[:2]
        swap = {first: second, second: first}
        with renamed_parameter(row, lambda given: [swap.get(n, n) for n in given]):
            check(row, "parameters swapped", {row.feature.value})
        count += 1
assert off(probe()) == set()
print(count)
"""


def test_every_change_of_a_symbol_is_noticed(host: Host) -> None:
    """It turns off the features that need the symbol, and no other, and the line names it."""
    places = Places.here()
    command = [sys.executable, "-c", MUTATE, str(places.root), str(places.host_tree(host.version))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 200
