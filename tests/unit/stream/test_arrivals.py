"""Blocks on their way from their file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from multigpu.errors import HostError
from multigpu.stream.arena import Arena
from multigpu.stream.arrivals import Arrivals
from multigpu.stream.homes import HomedBlock, lay_out_block
from tests.unit.stream.filed import Filed, write


def test_a_block_that_could_not_come_is_known_when_others_have(tmp_path: Path) -> None:
    models = {name: Filed(write(tmp_path / name, 1, 512), 1, 512) for name in ("short", "whole")}
    os.truncate(tmp_path / "short", 512)
    arrivals, rooms = Arrivals(torch.device("cpu")), Arena(torch.device("cpu"), [])
    for name, model in models.items():
        module = model.blocks["layers.0"]
        laid, size = lay_out_block(module, without=["scale"])
        homed = HomedBlock(name, module, rooms.room(size), [its for _, its in laid])
        arrivals.send_home(homed, laid, lambda name, _: models[name].pages["layers.0"])
    arrivals.start([])
    with pytest.raises(HostError, match="short could not be read from its model file: the model file has become"):
        arrivals.bring("short")
    assert arrivals.bring("whole") == 4 * 512 * 512
    assert arrivals.failed == {"short"}
    arrivals.close()
