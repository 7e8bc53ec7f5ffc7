"""Speeds that cannot be measured are None. (The others are measured on simulated accelerators, in tests/sim.)"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from multigpu.plan import CPU, DeviceId
from multigpu.stream.speeds import half_type, layer_flops, link_bandwidth

NOWHERE = DeviceId("nosuch", 0)


def test_the_cpu_has_no_link_to_itself_and_no_clock_of_its_own() -> None:
    assert link_bandwidth(CPU, CPU) is None
    assert layer_flops(CPU) is None


def test_what_a_backend_raises_is_none_and_a_line_for_those_who_look(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "multigpu"):
        assert link_bandwidth(CPU, NOWHERE) is None
        assert layer_flops(NOWHERE) is None
    assert [record.getMessage() for record in caplog.records] == [
        "[MultiGPU] the link from cpu to nosuch:0 cannot be measured",
        "[MultiGPU] the compute rate of nosuch:0 cannot be measured",
    ]


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True), torch.bfloat16),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation), torch.float16),
        (SimpleNamespace(is_bf16_supported=lambda: True), torch.bfloat16),
        (SimpleNamespace(), torch.float16),
    ],
    ids=["native", "emulated", "does not tell", "does not know"],
)
def test_the_type_is_one_that_the_device_computes_natively(module: SimpleNamespace, dtype: torch.dtype) -> None:
    assert half_type(module) == dtype
