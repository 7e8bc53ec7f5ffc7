"""The names of devices on other machines."""

from __future__ import annotations

import pytest

from multigpu.errors import AllocationError
from multigpu.plan import DeviceId
from multigpu.remote.names import RemoteDevice, is_remote, parse_remote


@pytest.mark.parametrize(
    ("text", "node", "device"),
    [
        ("ray://node-b/cuda:0", "node-b", DeviceId("cuda", 0)),
        (" RAY://Node-B/CUDA ", "node-b", DeviceId("cuda", 0)),
        ("ray://b/cpu", "b", DeviceId("cpu", None)),
        ("ray://10.0.0.7/default", "10.0.0.7", None),
    ],
)
def test_a_name_is_read_and_printed(text: str, node: str, device: DeviceId | None) -> None:
    found = parse_remote(text)
    assert found == RemoteDevice(node, device)
    assert parse_remote(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["ray://", "ray:///cuda:0", "ray://node-b", "ray://node-b/", "ray://node b/cuda:0", "ray://-b/cuda:0",
     "ray://node-b/cuda:0/1", "ray://node-b/disk", "ray://node-b/what?", "ray://" + 64 * "a" + "/cpu", "cuda:0"],
)  # fmt: skip
def test_a_wrong_name_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AllocationError, match="write|cuda:0") as refused:
        parse_remote(text)
    assert repr(text) in str(refused.value)


def test_local_names_are_not_remote() -> None:
    assert not any(map(is_remote, ("cuda:0", "default", "", "ray", "x-ray://b/cpu")))
    assert is_remote("ray://wrong")
