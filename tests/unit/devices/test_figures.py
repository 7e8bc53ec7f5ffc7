"""Figures outlast the process; a file that is damaged, read-only or written by two at once is never an error."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from multigpu.devices import backends, figures
from multigpu.devices.figures import MOST, FigureFile, figure_name
from multigpu.devices.inventory import Inventory
from multigpu.plan import CPU, DeviceId

FIRST, SECOND = DeviceId("cuda", 0), DeviceId("cuda", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "user" / "speeds.json"


def test_the_next_process_knows_a_figure(path: Path) -> None:
    FigureFile(path).put("link", 55.1e9)
    FigureFile(path).put("flops", 8e14)
    assert FigureFile(path).get("link") == 55.1e9
    assert FigureFile(path).get("flops") == 8e14
    assert FigureFile(path).get("other") is None
    assert [file.name for file in path.parent.iterdir()] == ["speeds.json"]


def test_measuring_anew_replaces_what_is_kept(path: Path) -> None:
    FigureFile(path).put("link", 28e9)
    anew = FigureFile(path, anew=True)
    assert anew.get("link") is None
    anew.put("link", 55e9)
    assert FigureFile(path).get("link") == 55e9


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "5", '"text"', '{"figures": 5}', '{"figures": {"link": "fast"}}',
        '{"figures": {"link": null}}',
        '{"figures": {"link": 0}}', '{"figures": {"link": -1}}', '{"figures": {"link": NaN}}',
        '{"figures": {"link": Infinity}}', "\x00" * 100, "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_empty_one_and_is_replaced(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    assert FigureFile(path).get("link") is None
    FigureFile(path).put("link", 55e9)
    assert FigureFile(path).get("link") == 55e9


def test_bytes_that_are_no_text(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\xff")
    assert FigureFile(path).get("link") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = FigureFile(tmp_path / "file" / "speeds.json")
    kept.put("link", 55e9)
    assert kept.get("link") is None
    (tmp_path / "speeds.json").mkdir()
    kept = FigureFile(tmp_path / "speeds.json")
    kept.put("link", 55e9)
    assert kept.get("link") is None


def test_the_oldest_figures_go(path: Path) -> None:
    kept = FigureFile(path)
    path.parent.mkdir()
    path.write_text(json.dumps({"figures": {f"old {i}": 1.0 for i in range(MOST)}}))
    kept.put("new", 2.0)
    assert kept.get("new") == 2.0 and kept.get("old 0") is None and kept.get("old 1") == 1.0


def test_two_that_write_at_once_leave_a_whole_file(path: Path) -> None:
    threads = [threading.Thread(target=FigureFile(path).put, args=(f"link {i}", 1.0 + i)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = {i: FigureFile(path).get(f"link {i}") for i in range(16)}
    assert any(kept.values()) and all(figure in (None, 1.0 + i) for i, figure in kept.items())


def driver(monkeypatch: pytest.MonkeyPatch, names: list[str], torch_version: str = "2.13.0") -> None:
    module = SimpleNamespace(get_device_name=lambda index: names[index])
    monkeypatch.setattr(backends, "torch", SimpleNamespace(cuda=module, _C=None, __version__=torch_version))


def test_a_figure_has_the_name_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ["Fast", "Slow"])
    links = {link: figure_name(link) for link in ((CPU, FIRST), (CPU, SECOND), (SECOND, FIRST), (FIRST,))}
    assert len(set(links.values())) == 4
    assert links[CPU, FIRST].startswith("cpu cuda:0 ")
    assert figure_name((CPU, FIRST)) == links[CPU, FIRST]
    driver(monkeypatch, ["Faster", "Slow"])
    changed = {link for link, name in links.items() if figure_name(link) != name}
    assert changed == {(CPU, FIRST), (SECOND, FIRST), (FIRST,)}
    driver(monkeypatch, ["Fast", "Slow"], torch_version="2.14.0")
    assert all(figure_name(link) != name for link, name in links.items())
    driver(monkeypatch, ["Fast", "Slow"])
    monkeypatch.setattr(figures, "VERSION", 0)
    assert all(figure_name(link) != name for link, name in links.items())


def test_what_is_kept_is_not_measured_and_what_is_measured_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ["Fast", "Slow"])
    measured: list[tuple[DeviceId, ...]] = []

    def measure(*devices: DeviceId) -> float:
        measured.append(devices)
        return 53.64e9

    for _ in range(2):  # two processes
        inventory = Inventory(measure, measure, FigureFile(path))
        assert inventory.bandwidth(CPU, FIRST) == inventory.flops(FIRST) == 53.6e9
    assert measured == [(CPU, FIRST), (FIRST,)]
    anew = Inventory(lambda *link: 55e9, kept=FigureFile(path, anew=True))
    assert anew.bandwidth(CPU, FIRST) == 55e9
    assert Inventory(measure, kept=FigureFile(path)).bandwidth(CPU, FIRST) == 55e9


def test_what_cannot_be_measured_is_not_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ["Fast"])
    assert Inventory(kept=FigureFile(path)).bandwidth(CPU, FIRST) is None
    assert not path.exists()


def test_a_device_that_does_not_tell_what_it_is_is_measured_each_time(path: Path) -> None:
    odd = DeviceId("nosuch", 0)
    broken = SimpleNamespace(get_device_name=lambda index: 1 / 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.torch, "nosuch", broken, raising=False)
        assert Inventory(lambda *link: 5e9, kept=FigureFile(path)).bandwidth(CPU, odd) == 5e9
    assert not path.exists()
