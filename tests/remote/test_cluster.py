"""Links to the nodes of a real cluster, and what they say when something dies. The last tests end the cluster."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from multigpu.cli.doctor import other_machines
from multigpu.errors import ClusterUnavailable, RemoteDeviceLost, RemoteError
from multigpu.remote.cluster import LOST, READY, Cluster, Relay, start_worker
from multigpu.remote.link import Message
from multigpu.remote.node import INLINE_BYTES, RayNode, environment
from multigpu.remote.token import make_token
from tests.remote.conftest import ECHO, NOWHERE
from tests.remote.processes import Descendants, below, until

EMPTY = Message(b"")


def process_of(cluster: Cluster, node: str) -> int:
    return int(cluster.link(node).call("process", EMPTY).header)


def test_the_nodes_are_listed_with_their_devices_and_memory(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    assert [(node.name, node.state) for node in nodes] == [("node-b", READY), ("node-c", READY)]
    for node in nodes:
        assert node.devices[-1].name == "cpu"
        assert node.devices[-1].total == psutil.virtual_memory().total
        assert 0 < (node.devices[-1].free or 0) < psutil.virtual_memory().total


def test_the_nodes_say_their_versions_and_how_far_they_are(cluster: Cluster) -> None:
    for node in cluster.nodes():
        assert node.versions["Python"] == platform.python_version()
        assert set(node.versions) == {"MultiGPU", "torch", "Python"}, "of the echo; a ComfyUI says more"
        assert cluster.round_trip(node.name) > 0


@pytest.mark.usefixtures("workers")
def test_doctor_names_the_nodes(head: str) -> None:
    text, all_ready = other_machines(head)
    assert all_ready
    assert re.search(r"node-b +ready: cpu \(.*iB\)\n +MultiGPU .*, torch .*, Python .*; round trip [0-9.]+ ms\n", text)
    assert "  node-c " in text


def test_doctor_says_what_is_wrong_with_a_cluster() -> None:
    text, usable = other_machines("127.0.0.1:9")
    assert not usable and "no Ray head answers at 127.0.0.1:9" in text


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 3), (INLINE_BYTES - 100,), (INLINE_BYTES + 1,), (9_000_000, 5)])
@pytest.mark.parametrize("node", ["node-b", "node-c"])
def test_bytes_come_back_as_they_were(cluster: Cluster, node: str, sizes: tuple[int, ...]) -> None:
    sent = Message(b'{"a": 1}', [os.urandom(size) for size in sizes])
    answer = cluster.link(node).call("echo", sent)
    assert answer.header == sent.header
    assert [bytes(buffer) for buffer in answer.buffers] == sent.buffers


def test_a_memoryview_of_other_items_is_sent_as_its_bytes(cluster: Cluster) -> None:
    words = memoryview(os.urandom(64)).cast("d", (2, 4))
    (answer,) = cluster.link("node-c").call("echo", Message(b"", [words])).buffers
    assert bytes(answer) == words.tobytes()


def test_an_error_of_the_service_is_told_in_its_words(cluster: Cluster) -> None:
    with pytest.raises(RemoteError, match="ray://node-b, fail: ValueError: no such thing") as caught:
        cluster.link("node-b").call("fail", Message(b"no such thing"))
    assert not isinstance(caught.value, RemoteDeviceLost)


def test_each_of_several_threads_gets_its_own_answer(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    links = [cluster.link(node) for node in ("node-b", "node-c")]
    sent = [Message(str(number).encode(), [os.urandom(number * 1000)]) for number in range(60)]
    answers = list(pool.map(lambda pair: links[pair[0] % 2].call("echo", pair[1]), enumerate(sent)))
    assert [(answer.header, bytes(answer.buffers[0])) for answer in answers] == [
        (message.header, message.buffers[0]) for message in sent
    ]


def test_a_node_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(
        RemoteDeviceLost, match="ray://node-x was lost during echo: the cluster has no worker"
    ) as caught:
        cluster.link("node-x").call("echo", EMPTY)
    assert (caught.value.node, caught.value.method) == ("node-x", "echo")


def test_an_interrupt_reaches_the_node_while_it_computes(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    link = cluster.link("node-b")
    waiting = pool.submit(link.call, "wait", EMPTY)
    assert cluster.nodes()[0].state == READY, "a node that computes still says what it is"
    assert until(lambda: link.interrupt() or waiting.done())
    assert waiting.result().header == b"interrupted"


def test_what_interrupts_the_caller_interrupts_the_node(head: str, cluster: Cluster) -> None:
    class Interrupted(Exception):
        pass

    def check() -> None:
        raise Interrupted

    impatient = Cluster(head, check)
    impatient._relay = cluster.relay()
    with pytest.raises(Interrupted):
        impatient.link("node-c").call("wait", EMPTY)
    assert cluster.link("node-c").call("echo", Message(b"free again")).header == b"free again"


def test_no_answer_in_time(cluster: Cluster) -> None:
    link = cluster.link("node-c")
    with pytest.raises(RemoteDeviceLost, match="no answer within 0.2 s"):
        link.call("wait", EMPTY, timeout=0.2)
    link.interrupt()
    assert link.call("echo", Message(b"next"), timeout=60).header == b"next"


def test_a_closed_link_calls_nobody(cluster: Cluster) -> None:
    link = cluster.link("node-c")
    link.close()
    with pytest.raises(RemoteDeviceLost, match="was closed"):
        link.call("echo", EMPTY)


def test_ray_is_not_in_this_process(cluster: Cluster) -> None:
    assert not [name for name in sys.modules if name.partition(".")[0] == "ray"]


def test_ten_thousand_calls_take_no_memory(cluster: Cluster) -> None:
    """Both sides are within 1 %. What Ray itself holds in the relay goes up and down, but 4 KiB a call are seen."""
    link = cluster.link("node-c")
    message = Message(b"{}", [os.urandom(4096)])
    numbers = (process_of(cluster, "node-c"), os.getpid(), cluster.relay().process)

    def memory(calls: int) -> list[int]:
        for _ in range(calls):
            link.call("echo", message)
        return [psutil.Process(number).memory_info().rss for number in numbers]

    before, after = memory(5000), memory(10_000)  # after some thousands, Ray's own caches are full
    growth = [later / earlier for earlier, later in zip(before, after, strict=True)]
    assert growth[0] <= 1.01 and growth[1] <= 1.01 and growth[2] <= 1.1, (before, after)


def test_another_token_is_refused(
    head: str, workers: dict[str, Relay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_token(tmp_path / "other")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    started = Descendants()
    with pytest.raises(ClusterUnavailable, match=f"{head} has another token than {tmp_path / 'other'}"):
        Cluster(head).nodes()
    assert started.left() == []


def test_a_cluster_without_token_is_refused(token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Descendants()
    for name, value in {**environment(token, os.environ), "RAY_AUTH_MODE": "disabled"}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.3", 0)) as free:
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="multigpu-"))
    node = RayNode(folder, ["--head", f"--port={port}", "--node-ip-address=127.0.0.3", "--include-dashboard=false"])
    try:
        with pytest.raises(ClusterUnavailable, match=f"127.0.0.3:{port} asks for no token"):
            Cluster(f"127.0.0.3:{port}").nodes()
    finally:
        node.stop()
    assert started.left() == []


def test_what_listens_and_is_no_head_is_refused() -> None:
    """It takes connections and never says a word."""
    started = Descendants()
    with socket.create_server(("127.0.0.6", 0)) as mute:
        head = f"127.0.0.6:{mute.getsockname()[1]}"
        with pytest.raises(ClusterUnavailable, match=f"what answers at {head} is not a Ray head"):
            Cluster(head).nodes()
    assert started.left() == []


@pytest.mark.parametrize("size", [0, 30_000_000], ids=["computing", "sending"])
def test_a_killed_actor_is_told_and_comes_back(cluster: Cluster, pool: ThreadPoolExecutor, size: int) -> None:
    process = process_of(cluster, "node-c")
    waiting = pool.submit(cluster.link("node-c").call, "wait", Message(b"", [bytes(size)]))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RemoteDeviceLost, match="ray://node-c was lost during wait: the process of its worker has died"):
        waiting.result()
    assert cluster.link("node-b").call("echo", Message(b"others go on")).header == b"others go on"

    def back() -> bool:
        try:
            return process_of(cluster, "node-c") != process
        except RemoteDeviceLost:
            return False

    assert until(back)


def test_a_killed_relay_is_told_and_the_next_call_connects_again(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    relay = cluster.relay()
    waiting = pool.submit(cluster.link("node-b").call, "wait", EMPTY)
    os.kill(relay.process, signal.SIGKILL)
    with pytest.raises(RemoteDeviceLost, match="the connection to the cluster has ended"):
        waiting.result()
    cluster.link("node-b").interrupt()  # what the dead one had asked for is still under way
    assert cluster.link("node-b").call("echo", Message(b"again")).header == b"again"


def test_nothing_outlives_a_killed_process(head: str, workers: dict[str, Relay]) -> None:
    started = Descendants()
    code = f"from multigpu.remote.cluster import Cluster; print(len(Cluster({head!r}).nodes()), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"2\n"
    child.kill()
    child.communicate()
    assert started.left() == []


def test_nothing_outlives_a_process_that_is_killed_while_it_connects(head: str, workers: dict[str, Relay]) -> None:
    started = Descendants()
    code = f"from multigpu.remote.cluster import Cluster; Cluster({head!r}).nodes()"
    child = subprocess.Popen([sys.executable, "-c", code])
    assert until(psutil.Process(child.pid).children)
    child.kill()
    child.wait()
    assert started.left() == []


def test_a_killed_node_is_told(cluster: Cluster, workers: dict[str, Relay], pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(cluster.link("node-c").call, "wait", EMPTY)
    below(workers["node-c"].process, "raylet/raylet").kill()
    with pytest.raises(RemoteDeviceLost, match="ray://node-c was lost during wait"):
        waiting.result()
    assert until(lambda: cluster.nodes()[1].state == LOST)
    assert cluster.nodes()[0].state == READY
    workers["node-c"].wait()


def test_a_node_that_is_started_again_is_found_by_those_who_knew_it(
    cluster: Cluster, head: str, workers: dict[str, Relay]
) -> None:
    workers["node-c"].close()
    workers["node-c"] = start_worker("node-c", head, NOWHERE, [], head_here=False, service=ECHO)
    assert [(node.name, node.state) for node in cluster.nodes()] == [("node-b", READY), ("node-c", READY)]
    assert cluster.link("node-c").call("echo", Message(b"here again")).header == b"here again"


def test_a_killed_head_is_told(
    cluster: Cluster, head: str, workers: dict[str, Relay], pool: ThreadPoolExecutor
) -> None:
    waiting = pool.submit(cluster.link("node-b").call, "wait", EMPTY)
    below(workers["node-b"].process, "gcs_server").kill()
    with pytest.raises(RemoteDeviceLost, match=rf"ray://node-b was lost during wait: .*the head at {head} no longer"):
        waiting.result()
    workers["node-b"].wait()
    with pytest.raises(ClusterUnavailable, match="no Ray head answers at"):
        cluster.nodes()
