"""`--disable-smart-memory`: ComfyUI unloads all models after every prompt. A kept model stays."""

from __future__ import annotations

from pathlib import Path

from devtools.hosts import NEWEST
from tests.devices.conftest import started
from tests.devices.test_lifecycle import CLIP_BYTES, MODEL_BYTES, ONE, TWO, ZERO, on_devices
from tests.host.lifecycle import BOTH, flux


def test_a_kept_model_stays_and_the_others_leave_after_every_prompt(tmp_path: Path) -> None:
    with started(NEWEST, tmp_path, "--disable-smart-memory") as machine:
        picture = machine.draw(flux(96))
        machine.wait_idle()
        assert machine.models() == [], "without a choice of ours ComfyUI unloads everything"
        workflow = on_devices(96, model=(ONE, "keep"), clip=(TWO, "default"))
        assert machine.draw(workflow) == picture
        machine.wait_idle()
        kept = machine.objects()
        assert kept.keys() == {"Flux"} and machine.allocated(ONE) > MODEL_BYTES
        assert machine.allocated(TWO) < CLIP_BYTES
        assert machine.draw(on_devices(97, model=(ONE, "keep"), clip=(TWO, "default"))) != picture
        machine.wait_idle()
        assert machine.objects() == kept, "it was not loaded again"
        machine.free(**BOTH)
        assert machine.objects() == kept

        beside = on_devices(96, model=(ONE, "keep"), clip=(ONE, "default"), vae=(ONE, "default"))
        assert machine.draw(beside) == picture
        machine.wait_idle()
        assert machine.objects() == {} and machine.held() == ["Flux"], "others on its device move it to RAM"
        assert machine.draw(beside) == picture
        machine.run(on_devices(98, model=(ONE, "eject")))
        machine.wait_idle()
        machine.free(**BOTH)
        machine.collect()
        assert machine.models() == [] and machine.held() == []
        assert [machine.allocated(device) for device in (ZERO, ONE, TWO)] == [0, 0, 0]
