"""Every allocation, `multigpu plan` command and planner program in the documentation is run here.

An allocation is inline code that looks like one: it has a device and an amount, or is `auto`, a lone fraction, or has
the archived pack's `#`. Texts that the docs show as mistakes stand in fenced blocks marked `text`, which are not read.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from multigpu.cli.plan import parse_budgets, parser, read_request, resting_in, split_words, with_disk
from multigpu.errors import DoesNotFit
from multigpu.files import describe_model, read_tensors
from multigpu.plan import CPU, Auto, DeviceId, Plan, format_request, make_plan, parse_request
from multigpu.units import GIB
from tests.unit.files.model_files import flux_tensors, write_safetensors

from .shapes import GPU0, GPU1, blocks_of, budget

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("web/docs/**/*.md")])
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
ALLOCATION = re.compile(
    r"[a-z]+(:\d+)?\s*,\s*(\*|[\d.]+\s*(%|[a-z]*)\*?)(;.*|#.*)?|auto(,.*)?|0?\.\d+|#\w+:?\d*;.*", re.I
)
COMMAND = re.compile(r"^\$?\s*python -m multigpu plan .*$", re.MULTILINE)
NOT_ON_THE_PATH = re.compile(r"^\$?\s*multigpu .*$", re.MULTILINE)


def allocations(page: Path) -> list[str]:
    """Inline code of the page, fenced blocks left out, that has the form of an allocation."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [text for text in CODE.findall(prose) if ALLOCATION.fullmatch(text.strip())]


def commands(page: Path) -> list[str]:
    """`python -m multigpu plan` lines of the page's console blocks."""
    blocks = [
        body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind in ("console", "bash", "sh")
    ]
    return [line.strip().lstrip("$ ") for block in blocks for line in COMMAND.findall(block.replace("\\\n", " "))]


ALLOCATIONS = [(page.name, text) for page in PAGES for text in allocations(page)]
PROGRAMS = [
    (page.name, body)
    for page in PAGES
    for kind, body in FENCE.findall(page.read_text(encoding="utf-8"))
    if kind == "python" and "from multigpu.plan import" in body
]
COMMANDS = [(page.name, line) for page in PAGES for line in commands(page)]


def test_the_reference_is_full_of_examples() -> None:
    assert sum(name == "allocation.md" for name, _ in ALLOCATIONS) >= 20
    assert sum(name == "allocation.md" for name, _ in COMMANDS) >= 4
    assert [name for name, _ in PROGRAMS] == ["planning.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_work_after_a_plain_clone(page: Path) -> None:
    blocks = (body for _, body in FENCE.findall(page.read_text(encoding="utf-8")))
    assert [line for block in blocks for line in NOT_ON_THE_PATH.findall(block)] == []


@pytest.mark.parametrize(("page", "text"), ALLOCATIONS)
def test_documented_allocations_parse(page: str, text: str) -> None:
    request = parse_request(text)
    assert parse_request(format_request(request)) == request


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documented")


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_documented_commands_plan(page: str, line: str, model_folder: Path) -> None:
    """The command as written, on files of Flux's shape under the names it uses, on its devices or two usual ones."""
    words = shlex.split(line)
    options = parser().parse_intermixed_args(words[words.index("plan") + 1 :])
    files, text = split_words(options.words)
    for number, file in enumerate(files):
        write_safetensors(
            model_folder / f"{file.name}.safetensors", flux_tensors(prefix=f"{number}." if number else "")
        )
    model = describe_model(read_tensors(model_folder / f"{file.name}.safetensors" for file in files))
    request, blocks = read_request(options, text), resting_in(files, model.blocks)
    budgets = with_disk(parse_budgets(options.devices or "cuda:0=24g@53,cpu=64g@25"), blocks, request)
    compute = DeviceId.parse(options.compute) if options.compute else budgets[0].device
    plan = make_plan(request, blocks, budgets, compute)
    assert plan.total_bytes == sum(block.bytes for block in model.blocks)


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_documented_programs_run(page: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, page, "exec"), {})
    assert "(computes)" in capsys.readouterr().out


def ten_gib(text: str) -> Plan:
    """The text on a model of 10 GiB in small blocks; cuda:0 computes and has 24 GiB."""
    budgets = [budget(GPU0, 24 * GIB), budget(GPU1, 12 * GIB), budget(CPU, 64 * GIB)]
    return make_plan(parse_request(text), blocks_of(*[GIB // 8] * 80), budgets, GPU0)


@pytest.mark.parametrize(
    ("text", "cuda0", "cuda1", "cpu"),
    [
        ("cuda:0,8gb;cuda:1,8gb;cpu,*", 8, 2, 0),
        ("cuda:1,8gb;cuda:0,8gb;cpu,*", 2, 8, 0),
        ("cuda:0,2gb;cuda:1,3gb", 2, 3, 5),
        ("cuda:0,8gb;cpu,*", 8, 0, 2),
        ("cuda:0,25%;cpu,75%", 2.5, 0, 7.5),
        ("cuda:0,1%;cpu,3%", 2.5, 0, 7.5),
        ("cuda:0,50%;cpu,*", 5, 0, 5),
        ("cuda:0,50%", 5, 0, 5),
        ("cuda:1,5gb*;cuda:0,6gb;cpu,*", 6, 4, 0),
        ("#cuda:0;4.0;cpu", 6, 0, 4),
        ("cuda:0,2gb;cpu,*#cuda:0;0.0;cpu", 2, 0, 8),
        ("cpu,*", 0, 0, 10),
        ("auto", 10, 0, 0),
    ],
)
def test_what_the_reference_says_comes_true(text: str, cuda0: float, cuda1: float, cpu: float) -> None:
    assert ("allocation.md", text) in ALLOCATIONS
    plan = ten_gib(text)
    assert [plan.bytes_on(device) / GIB for device in (GPU0, GPU1, CPU)] == [cuda0, cuda1, cpu]


def test_the_half_of_a_24_gib_card() -> None:
    blocks = blocks_of(*[GIB // 8] * 160)
    budgets = [budget(GPU0, 24 * GIB), budget(CPU, 64 * GIB)]
    assert make_plan(parse_request("cuda:0,0.5;cpu,*"), blocks, budgets, GPU0).bytes_on(GPU0) == 12 * GIB
    assert ("allocation.md", "cuda:0,0.5;cpu,*") in ALLOCATIONS


def test_auto_keeps_the_documented_reserve() -> None:
    blocks = blocks_of(*[GIB // 8] * 80)
    for request, reserve in ((Auto(), 2 * GIB), (parse_request("auto,3gb"), 3 * GIB)):
        plan = make_plan(request, blocks, [budget(GPU0, 8 * GIB), budget(CPU, 64 * GIB)], GPU0)
        assert 8 * GIB - GIB // 8 < plan.bytes_on(GPU0) + plan.ring_bytes + reserve <= 8 * GIB
    with pytest.raises(DoesNotFit, match="write auto,"):
        make_plan(Auto(12 * GIB), blocks, [budget(GPU0, 8 * GIB), budget(CPU, 64 * GIB)], GPU0)
