"""The surface is true: its rows, the stubs that the type checker uses, and the code name the same symbols."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from multigpu.host.surface import SURFACE, Symbol
from tests.unit import architecture as rules

STUBS = rules.ROOT / "stubs"
ROWS = {symbol.name: symbol for symbol in SURFACE}
OTHERWISE = {
    "comfy.model_base.BaseModel.": "comfy.model_patcher.ModelPatcher.model.",  # the host's patcher sets these
    "comfy.model_patcher.LoadedModule.": "comfy.model_patcher.ModelPatcher.load.",  # set on modules of any class
    "comfy.cli_args.Arguments.": "comfy.cli_args.args.",  # an object without a class of its own
}
"""How rows name what the stubs have in a class."""
KINDS = "comfy_api.latest.io."
"""Kinds of inputs and outputs: they take options that differ from kind to kind, which the golden schemas cover."""

Parameters = tuple[list[str], list[str]]
"""By position, by keyword only."""


@functools.cache
def stubs() -> dict[str, Parameters | None]:
    """Every symbol in the stubs, as rows name it, with its parameters if it is called."""
    found: dict[str, Parameters | None] = {}
    for path in STUBS.rglob("*.pyi"):
        module = ".".join(path.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__")
        for name, parameters in _symbols(module, ast.parse(path.read_text(encoding="utf-8")).body):
            as_row = next((name.replace(its, row) for its, row in OTHERWISE.items() if name.startswith(its)), name)
            found[name if name in ROWS else as_row] = parameters
    return found


def _symbols(owner: str, body: list[ast.stmt]) -> Iterator[tuple[str, Parameters | None]]:
    for node in body:
        if isinstance(node, ast.AnnAssign):
            yield f"{owner}.{ast.unparse(node.target)}", None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "__init__":
            yield f"{owner}.{node.name}", _parameters(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            start = next((its for its in node.body if getattr(its, "name", "") == "__init__"), None)
            yield f"{owner}.{node.name}", _parameters(start) if isinstance(start, ast.FunctionDef) else None
            yield from _symbols(f"{owner}.{node.name}", node.body)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    by_position = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    return by_position, [each.arg for each in function.args.kwonlyargs]


@pytest.mark.parametrize("name", sorted(stubs()))
def test_every_symbol_of_the_stubs_has_a_row(name: str) -> None:
    row, parameters = ROWS.get(name), stubs()[name]
    if row is None:  # a class of which only members are used
        inside = OTHERWISE.get(f"{name}.", f"{name}.")
        assert parameters is None and any(other.startswith(inside) for other in ROWS)
    elif parameters is not None:
        by_position, by_keyword = parameters
        assert tuple(by_position[: len(row.positional)]) == row.positional
        assert {*by_position, *by_keyword} == {*row.positional, *row.keywords}


@pytest.mark.parametrize("row", SURFACE, ids=lambda row: row.name)
def test_every_row_has_a_type_and_is_used(row: Symbol) -> None:
    kind = row.name.rpartition(".")[0] if row.name.startswith(KINDS) else ""
    assert row.name in stubs() or kind in stubs(), "the stubs lack it"
    assert row.path.rpartition(".")[2] in _used(), "no code uses it: remove the row"


@functools.cache
def _used() -> set[str]:
    """Every name that our code could mean a symbol of the host by."""
    found: set[str] = set()
    for path, tree in rules.files().items():
        if path == "host/surface.py" or not path.startswith(("host/", "nodes/", "entry.py")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found |= {node.name.rpartition(".")[2]}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value, f"weight{node.value}"}  # an attribute of a weight: f"{name}_comfy_model_dtype"
    return found


def test_the_stubs_are_where_the_type_checker_looks() -> None:
    project = (rules.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'mypy_path = "stubs"' in project and Path(STUBS, "comfy", "model_patcher.pyi").is_file()
