"""The repository keeps its own rules, and each rule notices when it is broken."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import re
import subprocess
import sys
from collections import Counter

import pytest

from multigpu import __version__, minimums
from multigpu.host.surface import SURFACE
from tests.unit import architecture as rules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BROKEN = [
    (rules.pure_files_import_pure_files, "plan/x.py", "import torch"),
    (rules.pure_files_import_pure_files, "plan/x.py", "def f():\n    from ..stream.lanes import Lane"),
    (rules.pure_files_import_pure_files, "plan/x.py", "from .. import runtime"),
    (rules.only_host_imports_the_host, "nodes/x.py", "import comfy.model_management as m"),
    (rules.only_host_imports_the_host, "runtime.py", "def f():\n    from nodes import NODE_CLASS_MAPPINGS"),
    (rules.own_imports_are_relative, "cli/x.py", "from multigpu.plan import Plan"),
    (rules.only_replacements_assign_into_other_modules, "host/x.py", "import a.b\na.b.c = 1"),
    (rules.only_replacements_assign_into_other_modules, "host/x.py", "from a import C\ndef f():\n    C.method = None"),
    (rules.only_replacements_assign_into_other_modules, "host/x.py", "import a as z\ndef f():\n    setattr(z, 'b', 1)"),
    (rules.no_module_level_mutable_state, "x.py", "cache = {}"),
    (rules.no_module_level_mutable_state, "x.py", "seen: set[int] = set()"),
    (rules.no_module_level_mutable_state, "x.py", "TABLE = {}\ndef f(k):\n    TABLE[k] = 1"),
    (rules.no_module_level_mutable_state, "x.py", "ROWS = []\ndef f(k):\n    ROWS.append(k)"),
    (rules.no_module_level_mutable_state, "x.py", "N = 0\ndef f():\n    global N"),
    (rules.nothing_runs_at_import, "x.py", "print('hello')"),
    (rules.nothing_runs_at_import, "x.py", "if True:\n    for x in y:\n        z(x)"),
    (rules.names_say_something, "host/utils.py", ""),
]

ALLOWED = [
    (rules.pure_files_import_pure_files, "plan/x.py", "import re\nfrom ..units import GIB\nfrom .types import Plan"),
    (rules.only_replacements_assign_into_other_modules, "host/replacements.py", "import a\na.b = 1"),
    (rules.only_replacements_assign_into_other_modules, "host/x.py", "import a\ndef f(module):\n    module.mark = a.b"),
    (
        rules.no_module_level_mutable_state,
        "x.py",
        "TABLE = {1: 2}\n__all__ = ['f']\ndef f():\n    rows = []\n    rows.append(1)",
    ),
    (
        rules.nothing_runs_at_import,
        "x.py",
        "'''doc'''\nimport re\nA = re.compile('x')\n'''about A'''\nif A:\n    import b",
    ),
]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: rules.Rule) -> None:
    assert [f"{path}: {problem}" for path, tree in rules.files().items() for problem in rule(path, tree)] == []


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_a_broken_rule_is_noticed(rule: rules.Rule, path: str, source: str) -> None:
    assert list(rule(path, ast.parse(source)))


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_what_is_allowed_is_not_reported(rule: rules.Rule, path: str, source: str) -> None:
    assert list(rule(path, ast.parse(source))) == []


def test_every_rule_has_a_case_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(rules.RULES)


def test_the_same_ray_is_asked_for_everywhere() -> None:
    from multigpu.remote.cluster import REQUIRED

    extras = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["ray"] == [REQUIRED]
    assert f"pip install '{REQUIRED}'" in (rules.ROOT / "docs/remote.md").read_text()


def test_devtools_do_without_tests() -> None:
    rule = rules.devtools_do_without_tests
    assert [f"{path}: {problem}" for path, tree in rules.devtools_files().items() for problem in rule(path, tree)] == []


TESTS_NEEDED = [
    ("devtools/x.py", "from tests.host import driver"),
    ("devtools/x.py", "def f():\n    import tests.sim.simdev as simdev"),
    ("devtools/x.py", "from ..tests import machines"),
    ("dev.py", "from tests import machines"),
    ("devtools/x.py", "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'tests.host.soak'])"),
    ("devtools/x.py", "import importlib\nimportlib.import_module('tests.machines')"),
]


@pytest.mark.parametrize(("path", "source"), TESTS_NEEDED)
def test_devtools_that_need_tests_are_noticed(path: str, source: str) -> None:
    assert list(rules.devtools_do_without_tests(path, ast.parse(source)))


def test_devtools_may_start_files_of_tests() -> None:
    source = (
        "from . import tests_of_mine\nCOMMAND = ('pytest', 'tests/unit')\nFILE = ROOT / 'tests' / 'sim' / 'serve.py'"
    )
    assert list(rules.devtools_do_without_tests("devtools/x.py", ast.parse(source))) == []


def test_host_symbols_are_found_in_every_way_to_write_them() -> None:
    source = """
from comfy import model_management as mm
import comfy.ops
from comfy.sd import VAE
def f():
    from execution import PromptQueue
    mm.free_memory(1)
    comfy.ops.cast_bias_weight.__name__
"""
    assert rules.host_symbols(ast.parse(source)) == {
        "comfy.model_management.free_memory", "comfy.ops.cast_bias_weight", "comfy.sd.VAE", "execution.PromptQueue",
    }  # fmt: skip


def test_every_host_symbol_that_is_used_is_in_the_surface() -> None:
    """One that is not there would break with the next ComfyUI without anyone being told."""
    listed = {symbol.name for symbol in SURFACE}
    for path, tree in rules.files().items():
        for used in sorted(rules.host_symbols(tree)):
            assert any(name == used or name.startswith(used + ".") for name in listed), f"{path} uses {used}: add a row"


def test_the_surface_has_no_row_twice() -> None:
    names = [symbol.name for symbol in SURFACE]
    assert len(names) == len(set(names))


IMPORT_ALL = """
import importlib, logging, sys, threading

class Poison:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in POISONED:
            raise AssertionError(f"{name} was imported")

happened = []
handler = logging.Handler()
handler.emit = lambda record: happened.append(record.getMessage())
logging.getLogger().addHandler(handler)
sys.meta_path.insert(0, Poison())
if "torch" not in POISONED:
    import torch  # first: what torch itself does at import is not watched
sys.addaudithook(lambda event, _: happened.append(event) if event in WATCHED else None)
for name in NAMES:
    importlib.import_module(name)
assert not happened, happened
assert threading.active_count() == 1, threading.enumerate()
if "torch" in sys.modules:
    assert not sys.modules["torch"].cuda.is_initialized()
"""

WATCHED = {"subprocess.Popen", "os.system", "socket.connect", "os.mkdir", "os.remove", "shutil.rmtree"}


def _name(path: str) -> str:
    return ".".join(("multigpu", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/"))).strip(".")


def _needs(path: str, trees: dict[str, ast.Module]) -> set[str]:
    """What a module imports from outside when it is imported, by itself or through other modules of the package."""
    found: set[str] = set()
    seen, waiting = {path}, [path]
    while waiting:
        outside, inside = _imported(waiting.pop(), trees)
        found |= outside
        waiting += inside - seen
        seen |= inside
    return found


def _imported(path: str, trees: dict[str, ast.Module]) -> tuple[set[str], set[str]]:
    """What a module itself imports when it is imported: names from outside, and paths inside the package."""
    outside, inside = set[str](), set[str]()
    for module, level in rules.imports_at_import(trees[path]):
        if level:
            target = rules.target_of(path, module, level)
            inside |= {name for name in (f"{target}.py", f"{target}/__init__.py") if name in trees}
        else:
            outside.add(module.partition(".")[0])
    return outside, inside


def _hostless() -> list[str]:
    """The modules that import without the host. What needs it then is covered on the real one, in tests/host."""
    trees = rules.files()
    trees.pop("__main__.py", None)
    hostless = [path for path in trees if not _needs(path, trees) & rules.HOST_MODULES]
    assert {"entry.py", "runtime.py", "host/surface.py", "host/capabilities.py", "devices/names.py"} <= {*hostless}
    assert all(path.startswith(("host/", "nodes/")) for path in trees.keys() - {*hostless})
    return hostless


def test_importing_without_torch_does_nothing() -> None:
    """Modules outside the torch packages import without torch and without the host."""
    with_torch = ("stream/", "devices/", "remote/codec.py", "host/remote/kept.py")
    torchless = [path for path in _hostless() if not path.startswith(with_torch) or rules.is_pure(path)]
    _import_in_a_process(
        [_name(path) for path in (*torchless, "devices/names.py", "devices/ram.py")], rules.HOST_MODULES | {"torch"}
    )


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_importing_does_nothing() -> None:
    """Those with torch import without the host."""
    _import_in_a_process([_name(path) for path in _hostless()], rules.HOST_MODULES)


def _import_in_a_process(names: list[str], poisoned: set[str]) -> None:
    head = f"NAMES = {sorted(names)!r}\nPOISONED = {sorted(poisoned)!r}\nWATCHED = {sorted(WATCHED)!r}\n"
    compileall.compile_dir(rules.ROOT / "multigpu", quiet=2)  # otherwise importing makes folders for bytecode
    result = subprocess.run(
        [sys.executable, "-c", head + IMPORT_ALL], cwd=rules.ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


def test_the_poison_works() -> None:
    with pytest.raises(AssertionError, match="json was imported"):
        _import_in_a_process(["json.tool"], {"json", "torch"})


def test_every_module_is_in_the_map() -> None:
    """And what the map names is there."""
    page = (rules.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page[page.index("## Map") : page.index("\nstubs/")]
    named = Counter(re.findall(r"[a-z_]+\.py", drawn))
    there = Counter(path.rpartition("/")[2] for path in rules.files() if not path.endswith("__init__.py"))
    missing = there - named
    assert not missing, f"docs/architecture.md does not name {sorted(missing)}"
    assert not {*named} - {*there} - {"__init__.py"}, "the map names files that are not there"


def test_every_file_that_a_page_names_is_there() -> None:
    named = re.compile(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|md|js|json))`")
    pages = [*(rules.ROOT / "docs").glob("*.md"), rules.ROOT / "README.md", rules.ROOT / "CONTRIBUTING.md"]
    files = [(page.name, name) for page in pages for name in named.findall(page.read_text(encoding="utf-8"))]
    assert len(files) > 30
    places = (rules.ROOT, rules.PACKAGE)
    assert [(page, name) for page, name in files if not any((place / name).exists() for place in places)] == []


def test_versions_agree() -> None:
    settings = tomllib.loads((rules.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["version"] == __version__
    python, torch = (".".join(map(str, oldest)) for oldest in (minimums.OLDEST_PYTHON, minimums.OLDEST_TORCH))
    assert settings["project"]["requires-python"] == f">={python}"
    assert settings["tool"]["multigpu"]["requires-torch"] == f">={torch}"
    readme = (rules.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {python} or newer and torch {torch} or newer" in re.sub(r"\s+", " ", readme)
    assert f"all {len(SURFACE)} host symbols are as expected" in readme


def test_the_entry_is_small_and_does_nothing_outside_the_host() -> None:
    source = (rules.ROOT / "__init__.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 20
    names: dict[str, object] = {"__package__": "", "__name__": "anything"}
    exec(compile(source, "__init__.py", "exec"), names)
    assert "comfy_entrypoint" not in names
