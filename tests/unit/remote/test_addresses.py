"""Addresses of heads and of this machine, without Ray."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from multigpu.errors import ClusterUnavailable
from multigpu.remote.cluster import Cluster, host_of, own_address, probe
from multigpu.remote.node import environment
from multigpu.remote.token import make_token
from tests.unit.architecture import ROOT


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_head_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe(f"127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"


@pytest.mark.parametrize(
    "head", ["127.0.0.1:{port}", "no-such-machine.invalid:{port}", "127.0.0.1:99999", "127.0.0.1:x"]
)
def test_a_head_that_does_not_answer_is_named(head: str) -> None:
    with pytest.raises(ClusterUnavailable, match=r"no Ray head answers at .*start it there with `python -m multigpu "):
        probe(head.format(port=closed_port()))


def test_a_silent_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine drops what is sent to it: with a full queue, the system does that here."""
    monkeypatch.setattr("multigpu.remote.cluster.PROBE_SECONDS", 0.1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        with socket.create_connection(address), pytest.raises(ClusterUnavailable, match="timed out"):
            for _ in range(4):
                probe(f"127.0.0.1:{address[1]}")


def test_a_name_that_is_not_looked_up_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lookup ends after the error."""
    monkeypatch.setattr("multigpu.remote.cluster.PROBE_SECONDS", 0.1)
    told = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        told.wait(30)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(ClusterUnavailable, match=r"no Ray head answers at slow:1 \(timed out\)"):
        probe("slow:1")
    told.set()


def test_a_cluster_is_not_asked_for_before_it_is_used_and_then_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    cluster = Cluster(f"127.0.0.1:{closed_port()}")
    with pytest.raises(ClusterUnavailable, match="token of the Ray cluster cannot be read"):
        cluster.nodes()
    make_token(tmp_path / "token")
    with pytest.raises(ClusterUnavailable, match="no Ray head answers"):
        cluster.link("node-b")
    monkeypatch.setattr("multigpu.remote.cluster.find_spec", lambda name: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = Cluster(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ClusterUnavailable, match=r"Ray is not installed for .*; pip install 'ray>="):
            cluster.link("node-b")


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_addresses_that_ray_would_replace_cannot_be_a_heads(address: str) -> None:
    with pytest.raises(ClusterUnavailable, match=rf"cannot have the address {address}.* 127\.0\.0\.2:\d+ for this"):
        host_of(f"{address}:{closed_port()}")


def test_a_head_cannot_listen_where_another_does_or_on_another_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for head in (f"127.0.0.1:{server.getsockname()[1]}", "192.0.2.1:6379"):
            with pytest.raises(ClusterUnavailable, match=f"no Ray head can listen at {head}"):
                host_of(head)


def test_nodes_on_one_machine_have_addresses_of_their_own() -> None:
    found = {own_address("127.0.0.2") for _ in range(20)}
    assert len(found) > 10 and all(ipaddress.ip_address(each).is_loopback for each in found)


def test_an_address_or_token_that_is_set_for_another_cluster_is_not_passed_on(tmp_path: Path) -> None:
    given = {"RAY_ADDRESS": "x", "RAY_AUTH_TOKEN": "y", "PYTHONPATH": "z", "PATH": "/bin", "RAY_AUTH_MODE": "disabled"}
    passed = environment(tmp_path, given)
    assert passed.keys() & {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} == set()
    assert passed["RAY_AUTH_MODE"] == "token" and passed["RAY_AUTH_TOKEN_PATH"] == str(tmp_path)
    assert passed["RAY_USAGE_STATS_ENABLED"] == "0"
    assert passed["PYTHONPATH"].split(":") == [str(ROOT), "z"] and passed["PATH"] == "/bin"


def test_nothing_of_this_is_imported_unless_a_cluster_is_named() -> None:
    """Nor is Ray, which is not installed here: a finder would be asked for it."""
    code = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "ray", "ray was imported"
sys.meta_path.insert(0, Finder())
import multigpu.cli, multigpu.settings, multigpu.runtime
runtime = multigpu.runtime.Runtime(multigpu.settings.Settings(), None)
assert runtime.remote is None
print([name for name in sys.modules if name.startswith(("multigpu.remote", "multigpu.host.remote"))])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
