"""One kind of simulated devices per process: SIMDEV is `cuda` (the default), `npu` or `mps`."""

from __future__ import annotations

import os

import pytest

KIND = os.environ.get("SIMDEV", "cuda").split(":")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process of the same suite runs."""
    ours = "test_one_device" if KIND == "mps" else "test_lifecycle"
    left_out = [item for item in items if item.path.stem != ours]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
