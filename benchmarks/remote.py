"""What a call to another node costs: `python benchmarks/remote.py [--nodes 1 2 4 8]`.

Runs in the development environment with Ray, which `python dev.py test --only remote` installs in `.dev/ray`. All
nodes are on this machine, with loopback addresses, and answer with what they were sent: the figures are those of Ray,
of the process that talks to it and of this machine, without a network. For each size, calls over a link alternate with
an echo over a bare TCP connection to another process; the table has both and their ratio.

From one node's figures, `multigpu/remote/scale.py` then predicts a fan-out over several, whose nodes wait instead of
computing, and the second table has the prediction and what was measured. The third predicts what cannot be run here.
The last says how long a caller waits for the error when something is killed or falls silent while it waits for an
answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
PICTURES, PICTURE_BYTES, COMPUTE = 16, 3 * 512 * 512 * 4, 0.5
SIZES = (0, 65_536, 262_144, 1_048_576, 10_485_760, 104_857_600)

ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while head := connection.recv(8, socket.MSG_WAITALL):
    data = bytearray(int.from_bytes(head, "little"))
    connection.recv_into(data, len(data), socket.MSG_WAITALL) if data else None
    connection.sendall(data or b"x")
"""


@contextmanager
def bare_echo() -> Iterator[Callable[[bytes], None]]:
    """Sends bytes to another process over TCP and takes them back."""
    child = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, socket.create_connection(("127.0.0.1", int(child.stdout.readline()))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def echo(data: bytes) -> None:
            connection.sendall(len(data).to_bytes(8, "little") + data)
            back, left = bytearray(max(1, len(data))), max(1, len(data))
            while left:
                left -= connection.recv_into(memoryview(back)[-left:], left)

        yield echo
        connection.shutdown(socket.SHUT_RDWR)


def seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / ".dev" / "ray")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / ".dev" / "ray")])
    from multigpu.remote.cluster import Cluster, start_worker
    from multigpu.remote.link import Message
    from multigpu.remote.scale import Road, fan_out_seconds
    from multigpu.remote.token import make_token

    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        make_token(token)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        with socket.create_server(("127.0.0.2", 0)) as free:
            head = f"127.0.0.2:{free.getsockname()[1]}"
        for number in range(max(options.nodes)):
            worker = start_worker(
                f"node-{number}", head, ROOT, [], head_here=number == 0, service="tests.remote.echo:start"
            )
            started.callback(worker.close)
        cluster = Cluster(head)
        started.callback(cluster.close)
        links = [cluster.link(f"node-{number}") for number in range(max(options.nodes))]
        echo = started.enter_context(bare_echo())

        print(f"One node, {options.rounds} rounds; medians in ms, there and back\n")
        print("| bytes each way | link | bare TCP echo | ratio | bytes beside the payload |")
        print("|---|---|---|---|---|")
        measured = {}
        for size in SIZES:
            data = os.urandom(size)
            message = Message(b"{}", [data])
            rounds = options.rounds if size < 50_000_000 else max(3, options.rounds // 4)
            calls = [partial(links[0].call, "echo", message), partial(echo, data)]
            pairs = [[seconds(call) for call in calls] for _ in range(rounds)]
            over_link, over_tcp = (statistics.median(column) for column in zip(*pairs, strict=True))
            measured[size] = over_link
            row = f"{over_link * 1e3:.2f} | {over_tcp * 1e3:.2f} | {over_link / over_tcp:.1f}"
            print(f"| {size} | {row} | {message.size - size} |")

        small, large = 1_048_576, 10_485_760
        road = Road(measured[0], 2 * (large - small) / (measured[large] - measured[small]))
        print(f"\nA call costs {road.call * 1e3:.2f} ms, and bytes go at {road.speed / 1e6:.0f} MB/s, there and back\n")
        print(f"{PICTURES} pictures of {PICTURE_BYTES} bytes, {COMPUTE:g} s each\n")
        print("| nodes | s, predicted | s, measured | measured / predicted | speed-up |")
        print("|---|---|---|---|---|")
        drawing = Message(str(COMPUTE).encode(), [bytes(8)])
        for count in options.nodes:
            with ThreadPoolExecutor(count) as pool:
                took = seconds(partial(fan_out, pool, links[:count], drawing))
            expected = fan_out_seconds(PICTURES, count, COMPUTE, PICTURE_BYTES, road)
            speed_up = PICTURES * COMPUTE / took
            print(f"| {count} | {expected:.2f} | {took:.2f} | {took / expected:.2f} | {speed_up:.1f} |")
        predictions(road)
        failures(head)


def fan_out(pool: ThreadPoolExecutor, links: list[Any], drawing: Any) -> None:
    """All pictures: each node draws one after the other."""

    def draw(number: int) -> None:
        for _ in range(number, PICTURES, len(links)):
            (answer,) = links[number].call("draw", drawing).buffers
            assert len(answer) == PICTURE_BYTES

    list(pool.map(draw, range(len(links))))


def predictions(here: Any) -> None:
    """Steps and fan-outs over networks: this machine's own cost, and then the network's."""
    from multigpu.remote.scale import GIGABIT, MODELS, Road, fan_out_speed_up, latent_bytes, step_overhead

    roads = {f"{gigabits} GbE": here.then(Road(0.0002, gigabits * GIGABIT * 0.94)) for gigabits in (1, 10)}
    print("\nPredicted: ms that a step takes longer\n")
    print(f"| model | MB each way | {' | '.join(roads)} |\n|---|---|---|---|")
    for name, sizes in MODELS.items():
        times = " | ".join(f"{step_overhead(sizes, road) * 1e3:.0f}" for road in roads.values())
        print(f"| {name} | {sizes.rows * sizes.latent / 1e6:.1f} | {times} |")
    print("\nPredicted: speed-up of 64 pictures of 1024 x 1024, 10 s each, as raw 32-bit pixels\n")
    print(f"| workers | {' | '.join(roads)} |\n|---|---|---|")
    pixels = latent_bytes(3, 1024, 1024, shrink=1)
    for workers in (1, 2, 4, 8, 16, 32, 64):
        ups = " | ".join(f"{fan_out_speed_up(64, workers, 10.0, pixels, road):.1f}" for road in roads.values())
        print(f"| {workers} | {ups} |")


def failures(head: str) -> None:
    """Seconds from a loss to the error, on a cluster of its own with the head's address and another port."""
    from multigpu.errors import RemoteDeviceLost
    from multigpu.remote.cluster import Cluster, start_worker
    from multigpu.remote.link import Message
    from tests.remote.processes import below

    print("\nSeconds until a call that waits fails\n\n| lost | s | said |\n|---|---|---|")
    losses = {
        "the worker's process": ("node-b", "ray::Worker", signal.SIGKILL),
        "its machine's node": ("node-b", "raylet/raylet", signal.SIGKILL),
        "its machine falls silent": ("node-b", "", signal.SIGSTOP),
        "the head": ("node-a", "gcs_server", signal.SIGKILL),
    }
    for what, (machine, process, sign) in losses.items():
        with socket.create_server((head.partition(":")[0], 0)) as free:
            own = f"{head.partition(':')[0]}:{free.getsockname()[1]}"
        with ExitStack() as started:
            service = {"service": "tests.remote.echo:start"}
            workers = {"node-a": start_worker("node-a", own, ROOT, [], head_here=True, **service)}
            started.callback(workers["node-a"].close)
            workers["node-b"] = start_worker("node-b", own, ROOT, [], head_here=False, **service)
            started.callback(workers["node-b"].close)
            cluster = Cluster(own)
            started.callback(cluster.close)
            link = cluster.link("node-b")
            link.call("echo", Message(b""))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(link.call, "wait", Message(b""))
                time.sleep(1)
                root = psutil.Process(workers[machine].process)
                chosen = [below(root.pid, process)] if process else [*root.children(recursive=True), root]
                before = time.perf_counter()
                for each in chosen:
                    each.send_signal(sign)
                lost = waiting.exception()
                assert isinstance(lost, RemoteDeviceLost), lost
                print(f"| {what} | {time.perf_counter() - before:.1f} | {lost.problem} |", flush=True)
            for each in chosen if sign == signal.SIGSTOP else ():
                each.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    main()
