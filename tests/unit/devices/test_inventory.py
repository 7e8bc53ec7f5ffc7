"""The inventory: labels as workflows write them, one probe, and broken backends that are reported and not raised."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from multigpu.devices import backends, figures
from multigpu.devices import inventory as inventory_module
from multigpu.devices.backends import BACKENDS, Backend, Device
from multigpu.devices.caches import cached_bytes, reserved_bytes
from multigpu.devices.inventory import Inventory
from multigpu.errors import AllocationError, BackendUnavailable, UnknownDevice
from multigpu.plan import CPU, DeviceId
from multigpu.remote.worker import describe

GIB = 1024**3
CARDS = {
    "cuda": [
        Device(DeviceId("cuda", 0), "Fast Card", 24 * GIB),
        Device(DeviceId("cuda", 1), "Old Card", 8 * GIB),
    ],
    "directml": [Device(DeviceId("directml", 0), "Another", None)],
}


def two_cards(backend: Backend) -> list[Device]:
    if backend.type == "xpu":
        raise BackendUnavailable("xpu is installed but does not work: no driver")
    return CARDS.get(backend.type, [])


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers tell of the cards above, and of nothing else."""
    monkeypatch.setattr(inventory_module, "probe", two_cards)


pytestmark = pytest.mark.usefixtures("cards")


def test_accelerators_come_in_order_and_the_cpu_last() -> None:
    assert Inventory().labels() == ["cuda:0", "cuda:1", "directml:0", "cpu"]


def test_a_broken_backend_is_reported_not_raised() -> None:
    assert Inventory().problems == ("xpu is installed but does not work: no driver",)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("cuda:1", DeviceId("cuda", 1)),
        ("CUDA:1", DeviceId("cuda", 1)),
        ("cuda", DeviceId("cuda", 0)),
        ("gpu:1", DeviceId("cuda", 1)),
        ("gpu:2", DeviceId("directml", 0)),
        ("corex:0", DeviceId("cuda", 0)),
        ("privateuseone:0", DeviceId("directml", 0)),
        ("cpu", CPU),
    ],
)
def test_labels_mean_devices(text: str, meant: DeviceId) -> None:
    assert Inventory().resolve(text) == meant
    assert Inventory().find(DeviceId.parse(text)) == meant


@pytest.mark.parametrize("text", ["cuda:2", "gpu:3", "mps", "xpu:0", "npu:0"])
def test_a_device_that_is_not_here_is_refused_with_the_list(text: str) -> None:
    with pytest.raises(UnknownDevice) as refused:
        Inventory().resolve(text)
    assert str(refused.value).startswith(f"{text} is not on this machine, which has cuda:0 (Fast Card, 24.00 GiB), ")
    assert Inventory().find(DeviceId.parse(text)) is None


def test_what_is_no_device_is_refused_as_such() -> None:
    with pytest.raises(AllocationError, match="is not a device; write its type and number"):
        Inventory().resolve("the fast one")


def test_it_is_probed_once_and_not_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(backend: Backend) -> list[Device]:
        seen.append(backend.type)
        return []

    monkeypatch.setattr(inventory_module, "probe", look)
    inventory = Inventory()
    assert seen == []
    threads = [threading.Thread(target=inventory.labels) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [backend.type for backend in BACKENDS]


class Stopwatch:
    """Measures as told and remembers what it was asked."""

    def __init__(self, *figures: float | None) -> None:
        self.figures = list(figures)
        self.asked: list[tuple[DeviceId, ...]] = []

    def __call__(self, *devices: DeviceId) -> float | None:
        self.asked.append(devices)
        return self.figures.pop(0)


FIRST, SECOND = DeviceId("cuda", 0), DeviceId("cuda", 1)


def test_links_are_measured_once_for_each_direction() -> None:
    links = Stopwatch(53.64e9, 12.446e9, 19.96e9)
    inventory = Inventory(measure_link=links)
    assert links.asked == []
    for _ in range(2):
        assert inventory.bandwidth(CPU, FIRST) == 53.6e9
        assert inventory.bandwidth(SECOND, FIRST) == 12.4e9
        assert inventory.bandwidth(FIRST, SECOND) == 20e9
    assert links.asked == [(CPU, FIRST), (SECOND, FIRST), (FIRST, SECOND)]


def test_compute_rates_are_measured_once_for_each_device() -> None:
    rates = Stopwatch(657.3e12, 8.049e12)
    inventory = Inventory(measure_flops=rates)
    for _ in range(2):
        assert inventory.flops(FIRST) == 657e12
        assert inventory.flops(SECOND) == 8.05e12
    assert rates.asked == [(FIRST,), (SECOND,)]


def test_what_cannot_be_measured_is_not_tried_again() -> None:
    links, rates = Stopwatch(None), Stopwatch(None)
    inventory = Inventory(measure_link=links, measure_flops=rates)
    for _ in range(2):
        assert inventory.bandwidth(CPU, FIRST) is None
        assert inventory.flops(FIRST) is None
    assert len(links.asked) == len(rates.asked) == 1


def test_nothing_is_measured_for_computing_on_the_cpu_or_from_a_device_to_itself() -> None:
    never = Stopwatch()
    inventory = Inventory(measure_link=never, measure_flops=never)
    assert inventory.bandwidth(FIRST, CPU) is None
    assert inventory.bandwidth(FIRST, FIRST) is None
    assert inventory.flops(CPU) is None
    assert never.asked == []


def test_threads_that_ask_together_wait_for_one_measurement() -> None:
    begun, asked = threading.Event(), []

    def slow(*devices: DeviceId) -> float:
        asked.append(devices)
        begun.set()
        threading.Event().wait(0.05)  # the others ask meanwhile
        return 25e9

    inventory = Inventory(measure_link=slow)
    figures: list[float | None] = []
    threads = [threading.Thread(target=lambda: figures.append(inventory.bandwidth(CPU, FIRST))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    assert inventory.labels()[0] == "cuda:0", "measuring does not hold up who only asks for the devices"
    for thread in threads:
        thread.join()
    assert figures == [25e9] * 8
    assert asked == [(CPU, FIRST)]


def test_this_machine_is_probed_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_module, "probe", backends.probe)
    inventory = Inventory()
    assert inventory.problems == ()
    assert inventory.devices[-1].id == CPU
    free, total = inventory.free(CPU), inventory.devices[-1].total
    assert free is not None and total is not None and 0 < free <= total


class Failing:
    """A vendor's module whose driver is missing."""

    @staticmethod
    def is_available() -> bool:
        raise RuntimeError("driver/library version mismatch")


def test_what_a_vendors_module_raises_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.torch, "mlu", Failing, raising=False)
    monkeypatch.setattr(inventory_module, "probe", backends.probe)
    inventory = Inventory()
    assert inventory.labels() == ["cpu"]
    assert inventory.problems == ("mlu is installed but does not work: driver/library version mismatch",)


class Kept:
    """Figures of an earlier process, and how often they were asked for."""

    def __init__(self, **figures: float) -> None:
        self.figures, self.asked = figures, 0

    def get(self, name: str) -> float | None:
        self.asked += 1
        return next((its for start, its in self.figures.items() if name.startswith(start.replace("_", " "))), None)

    def put(self, name: str, figure: float) -> None:
        raise AssertionError("nothing was measured")


def test_links_are_those_that_were_measured_and_none_is_measured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "identity", str)
    zero, one = DeviceId("cuda", 0), DeviceId("cuda", 1)
    kept, measured = Kept(**{"cuda:1_cuda:0": 3.0}), list[object]()
    inventory = Inventory(measure_link=lambda *pair: measured.append(pair), kept=kept)
    assert inventory.links() == {(one, zero): 3.0} and not measured
    asked = kept.asked
    assert inventory.links() == {(one, zero): 3.0} and kept.asked == asked, "each is looked up once"
    inventory._figures[CPU, zero] = 2.0
    assert inventory.links() == {(CPU, zero): 2.0, (one, zero): 3.0}
    assert inventory.known(one) is None and inventory.known(CPU, zero) == 2.0


def test_links_do_not_wait_for_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "identity", str)
    inventory = Inventory(kept=Kept(**{"cuda:1_cuda:0": 3.0}))
    with inventory._measuring:
        assert inventory.links() == {}
    assert len(inventory.links()) == 1


def test_a_gpu_that_this_process_does_not_use_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for its cache, and not for what a worker tells of its machine's devices."""
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_stats", {0: {"reserved_bytes.all.current": 7}}.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {0: (5, 9)}.__getitem__)
    for ask in (cached_bytes, reserved_bytes):
        assert [ask(DeviceId("cuda", index)) for index in (0, 1)] == [7, 0]
    gpus = describe(SimpleNamespace(versions=dict))["devices"][:2]
    assert gpus == [
        {"name": "cuda:0", "total": 24 * GIB, "free": 5},
        {"name": "cuda:1", "total": 8 * GIB, "free": None},
    ]
