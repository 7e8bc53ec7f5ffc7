"""Plans go by what links and devices were measured to achieve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from multigpu.plan import CPU, Auto, DeviceId, Plan, Request, parse_request
from multigpu.target import Target
from tests.engine.pack import Pack
from tests.engine.studio import Studio

pytestmark = pytest.mark.accelerator

MB = 10**6


def leaving(pack: Pack, studio: Studio, stays: int = 20 * MB) -> Auto:
    """An automatic request that leaves `stays` bytes of the compute device to the model and its ring."""
    from multigpu.host.device_memory import budgets

    zero, *_ = budgets(studio.placer.inventory.devices)
    return Auto(reserve=zero.free - stays)


def planned(pack: Pack, studio: Studio, inventory: object, request: Request, compute: str | None = None) -> Plan | None:
    """The plan for a toy model on a machine with this inventory; None where nothing leaves."""
    placer = replace(pack.runtime.placer, inventory=inventory)
    placed = placer.place(studio.flux(), Target(DeviceId.parse(compute or studio.accelerators[0]), request))
    return placed.placed.plan if hasattr(placed, "placed") else None


@pytest.mark.parametrize("fast", [1, 2])
def test_auto_prefers_the_donor_whose_link_is_fast(studio: Studio, pack: Pack, fast: int) -> None:
    from multigpu.runtime import new_inventory

    zero, donor, other = (studio.accelerators[i] for i in (0, fast, 3 - fast))
    studio.world.set_bandwidth(donor, zero, 40e9)
    studio.world.set_bandwidth(other, zero, 1e9)
    studio.world.set_bandwidth("cpu", zero, 4e9)
    studio.world.set_compute_rate(zero, flops=1e11)
    plan = planned(pack, studio, new_inventory(), leaving(pack, studio))
    assert plan is not None and plan.forecast is not None
    assert {str(placement.home) for placement in plan.streamed} == {donor}
    ((_, seconds),) = plan.forecast.links
    assert seconds == pytest.approx(plan.bytes_on(DeviceId.parse(donor)) / 40e9)


def test_the_forecast_goes_by_the_measured_compute_rate(studio: Studio, pack: Pack) -> None:
    from multigpu.devices.inventory import Inventory

    def compute(flops: float) -> float:
        inventory = Inventory(measure_flops=lambda device: flops)
        plan = planned(pack, studio, inventory, parse_request(f"{studio.accelerators[0]},50%;cpu,*"))
        assert plan is not None and plan.forecast is not None
        return plan.forecast.compute

    assert compute(50e12) == pytest.approx(2 * compute(100e12))


def test_speeds_are_kept_in_comfyuis_user_directory(studio: Studio, pack: Pack) -> None:
    import folder_paths

    from multigpu.runtime import Runtime

    zero = DeviceId.parse(studio.accelerators[0])
    file = Path(folder_paths.get_user_directory(), "__multigpu", "speeds.json")
    settings, capabilities = pack.runtime.settings, pack.runtime.capabilities

    def measured(link: float, measure: bool = False) -> float | None:
        """In a new process, on a machine whose link has this speed."""
        studio.world.set_bandwidth("cpu", str(zero), link)
        return Runtime(replace(settings, measure=measure), capabilities).inventory.bandwidth(CPU, zero)

    try:
        assert measured(40e9) == pytest.approx(40e9)
        assert file.is_file()
        assert measured(20e9) == pytest.approx(40e9), "it is not measured again"
        assert measured(20e9, measure=True) == pytest.approx(20e9)
        assert measured(40e9) == pytest.approx(20e9)
    finally:
        file.unlink(missing_ok=True)


def test_only_links_that_matter_are_measured(studio: Studio, pack: Pack) -> None:
    from multigpu.devices.inventory import Inventory

    zero, one, two = map(DeviceId.parse, studio.accelerators)

    def measured(request: Request, compute: str | None = None) -> set[tuple[DeviceId, ...]]:
        asked: set[tuple[DeviceId, ...]] = set()
        inventory = Inventory(measure_link=lambda *link: asked.add(link), measure_flops=lambda *own: asked.add(own))
        planned(pack, studio, inventory, request, compute)
        return asked

    assert measured(Auto()) == set(), "it fits"
    assert measured(leaving(pack, studio)) == {(zero,), (one, zero), (two, zero), (CPU, zero)}
    assert measured(parse_request(f"{zero},50%;{two},*")) == {(zero,), (two, zero)}
    assert measured(parse_request(f"{zero},100%")) == set()
    assert measured(Auto(), "cpu") == set()
