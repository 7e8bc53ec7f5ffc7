"""The rules of docs/architecture.md as functions over source text. Each returns what breaks it, in words."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "multigpu"
DEVTOOLS = ROOT / "devtools"

PURE = ("errors.py", "units.py", "plan/", "lifecycle/", "stream/schedule.py", "stream/ring_ledger.py",
        "telemetry/", "remote/link.py", "remote/scale.py", "remote/names.py", "remote/facts.py")  # fmt: skip
"""Files and folders that import the standard library and each other only."""

HOST_MODULES = {
    "comfy", "comfy_api", "comfy_api_nodes", "comfy_config", "comfy_execution", "comfy_extras", "comfyui_version",
    "execution", "folder_paths", "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip

MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "sort",
            "update"}  # fmt: skip
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict",
                 "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}  # fmt: skip
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager"}

MODULE_OF_TESTS = re.compile(r"tests(\.\w+)+")
"""As for `python -m` or `import_module`. A file or folder of tests has slashes in its name, or stands for itself."""

Rule = Callable[[str, ast.Module], Iterator[str]]
"""Takes a file's path below `multigpu/` and its tree; a rule about devtools, its path in the repository."""


def files() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its path below it."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def devtools_files() -> dict[str, ast.Module]:
    """`dev.py` and every module of `devtools/`, parsed, by its path in the repository."""
    paths = [ROOT / "dev.py", *sorted(DEVTOOLS.rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def is_pure(path: str) -> bool:
    return path.startswith(PURE)


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module, level) of every import, wherever it stands; type checkers' imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module is None:
                yield from ((alias.name, node.level) for alias in node.names)
            else:
                yield node.module, node.level


def imports_at_import(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The imports that happen when the module is imported; `from . import a` means the module a."""
    pending: list[ast.AST] = [*tree.body]
    while pending:
        node = pending.pop()
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imports(ast.Module(body=[node], type_ignores=[]))
        elif not typing_only and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += ast.iter_child_nodes(node)


def target_of(path: str, module: str, level: int) -> str:
    """The file or folder below `multigpu/` that a relative import means."""
    folder = path.split("/")[:-level]
    return "/".join([*folder, *module.split(".")])


def pure_files_import_pure_files(path: str, tree: ast.Module) -> Iterator[str]:
    if not is_pure(path):
        return
    for module, level in _imports(tree):
        if level == 0 and module.partition(".")[0] not in sys.stdlib_module_names:
            yield f"imports {module}, which is not in the standard library"
        target = target_of(path, module, level) if level else ""
        if level and not any(is_pure(candidate) for candidate in (f"{target}.py", f"{target}/")):
            yield f"imports {target}, which is not pure"


def only_host_imports_the_host(path: str, tree: ast.Module) -> Iterator[str]:
    if not path.startswith("host/"):
        for module, level in _imports(tree):
            if level == 0 and module.partition(".")[0] in HOST_MODULES:
                yield f"imports {module}; only host/ may"


def own_imports_are_relative(path: str, tree: ast.Module) -> Iterator[str]:
    for module, level in _imports(tree):
        if level == 0 and module.partition(".")[0] in ("multigpu", "tests", "devtools"):
            yield f"imports {module} by its absolute name"


def only_replacements_assign_into_other_modules(path: str, tree: ast.Module) -> Iterator[str]:
    """Assigning to an attribute of what came from an absolute import changes someone else's module or class."""
    if path == "host/replacements.py":
        return
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.level == 0)
        for alias in node.names
    }
    for node in ast.walk(tree):
        for target in _assigned(node):
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if target is not root and isinstance(root, ast.Name) and root.id in foreign:
                yield f"line {target.lineno} assigns to {ast.unparse(target)}; only host/replacements.py may"


def _assigned(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes, `setattr(a, "b", c)` included."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        named = ast.Attribute(value=node.args[0], attr="set by " + node.func.id, ctx=ast.Store())
        return [ast.copy_location(named, node)]
    return []


def no_module_level_mutable_state(path: str, tree: ast.Module) -> Iterator[str]:
    """A table may be a dict or a list if it is a constant: named in capitals and changed by nobody."""
    tables = set()
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            names = [target.id for target in _assigned(statement) if isinstance(target, ast.Name)]
            if names and _is_mutable(statement.value):
                tables.update(names)
                wrong = [name for name in names if name != name.upper() and name != "__all__"]
                yield from (f"line {statement.lineno} binds {name} to something mutable" for name in wrong)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno} uses global"
        for changed in _mutated(node):
            if changed in tables:
                yield f"line {node.lineno} changes the constant {changed}"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _mutated(node: ast.AST) -> list[str]:
    """Names whose content a node changes: `x[i] = y`, `del x[i]`, `x += y`, `x.append(y)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return [node.func.value.id] if isinstance(node.func.value, ast.Name) else []
    targets = _assigned(node)
    found = [target.value for target in targets if isinstance(target, ast.Subscript)]
    found += [node.target] if isinstance(node, ast.AugAssign) else []
    return [name.id for name in found if isinstance(name, ast.Name)]


def nothing_runs_at_import(path: str, tree: ast.Module) -> Iterator[str]:
    """At module level: imports, definitions, constants, and conditions around those. No bare call, loop or with."""
    if path == "__main__.py":
        return
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.If):
            pending += statement.body + statement.orelse
        elif isinstance(statement, ast.Try):
            pending += (
                statement.body + statement.orelse + [line for handler in statement.handlers for line in handler.body]
            )
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        elif not isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
                                        ast.Assign, ast.AnnAssign)):  # fmt: skip
            yield f"line {statement.lineno} runs when the module is imported: {ast.unparse(statement)[:60]}"


def names_say_something(path: str, tree: ast.Module) -> Iterator[str]:
    stems = {part.removesuffix(".py") for part in path.split("/")}
    yield from (f"the module name {stem} says nothing" for stem in sorted(stems & BANNED_NAMES))


RULES: tuple[Rule, ...] = (
    pure_files_import_pure_files, only_host_imports_the_host, own_imports_are_relative,
    only_replacements_assign_into_other_modules, no_module_level_mutable_state, nothing_runs_at_import,
    names_say_something,
)  # fmt: skip


def devtools_do_without_tests(path: str, tree: ast.Module) -> Iterator[str]:
    """Tests import devtools, so devtools must not import tests; they start files of tests by their path."""
    for module, level in _imports(tree):
        if module.partition(".")[0] == "tests" and (level == 0 or path.count("/") < level):
            yield f"imports {module}; tests import devtools, not the other way round"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_OF_TESTS.fullmatch(node.value):
            yield f"line {node.lineno} names the module {node.value}; start a file of tests by its path"


def host_symbols(tree: ast.Module) -> set[str]:
    """The host symbols a module names: `from comfy.a import b`, and `a.b` where a is an imported host module."""
    modules: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in HOST_MODULES:
                    modules[alias.asname or alias.name] = alias.name
        elif (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").partition(".")[0] in HOST_MODULES
        ):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if node.module == "comfy":  # its names are modules
                    modules[alias.asname or alias.name] = full
                else:
                    found.add(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            full = f"{module}.{node.attr}"
            if full not in modules.values():
                found.add(full)
    return found
