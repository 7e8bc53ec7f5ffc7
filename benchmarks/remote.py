"""What a call to another node costs: `python benchmarks/remote.py [--nodes 1 2 4 8]`.

Runs in the development environment with Ray, which `python dev.py test --only remote` installs in `.dev/ray`. All
nodes are on this machine, with loopback addresses, and answer with what they were sent: the figures are those of Ray,
of the process that talks to it and of this machine, without a network.

For each size, three echoes alternate: a tensor over a link, packed and unpacked on both sides of the call as components
do; an array over a Ray actor without anything of ours; and bytes over a bare TCP connection to another process. The
limit for a link is 2 ms for an empty call, 10 ms for 1 MB, and 25 ms for each further 10 MB. Other work on the
machine makes everything slower, so a limit is kept as a ratio if the link's median is at most as many times that of
Ray's echo as the limit is of the least time that Ray's echo took in the same run. The first table has all this for each
number of nodes, which take turns; the second has the bytes of messages beside their tensors.

From the figures for one node at three sizes, `multigpu/remote/scale.py` then predicts other sizes, and a fan-out over
several nodes, which wait instead of computing: these tables have the predictions and what was measured. The next ones
predict what cannot be run here. The last says how long a caller waits for the error when something is killed or falls
silent while it waits for an answer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
PICTURES, PICTURE_BYTES, COMPUTE = 16, 3 * 512 * 512 * 4, 0.5
MB = 1_000_000
FITTED = (0, MB, 10 * MB)
"""The sizes from which the road is fitted; the others are predicted."""
SIZES = (0, 64_000, 250_000, MB, 4 * MB, 10 * MB, 30 * MB, 100 * MB)

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

RAY_ECHO = """
import sys, time
import numpy, ray
head, own = sys.argv[1:]
ray.init(address=head, _node_ip_address=own, log_to_driver=False, logging_level="ERROR")
class Echo:
    def echo(self, data):
        return data
there = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and "multigpu:node-0" in node["Resources"])
where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(there, soft=False)
actor = ray.remote(num_cpus=0, scheduling_strategy=where)(Echo).remote()
print("ready", flush=True)
for line in sys.stdin:
    data = numpy.frombuffer(bytes(int(line)), dtype=numpy.uint8)
    before = time.perf_counter()
    answer = ray.get(actor.echo.remote(data))
    print(time.perf_counter() - before, flush=True)
    assert answer.nbytes == data.nbytes
"""


@contextmanager
def ray_echo(head: str, own: str) -> Iterator[Callable[[int], float]]:
    """Seconds that so many bytes take to an actor of node-0 and back, from the Ray node with the address `own`."""
    from multigpu.remote.node import environment

    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    command = [sys.executable, "-c", RAY_ECHO, head, own]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(token, os.environ), **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"

        def echo(size: int) -> float:
            print(size, file=child.stdin, flush=True)
            return float(child.stdout.readline())  # type: ignore[union-attr]

        yield echo
        child.stdin.close()


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
    from multigpu.remote.token import make_token
    from tests.remote.processes import below

    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        make_token(token)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        with socket.create_server(("127.0.0.2", 0)) as free:
            head = f"127.0.0.2:{free.getsockname()[1]}"
        workers, links, measured = 0, [], {}
        cluster = Cluster(head)
        started.callback(cluster.close)
        tcp = started.enter_context(bare_echo())
        print(f"Medians of {options.rounds} rounds in ms, there and back; load {os.getloadavg()[0]:.0f}\n")
        print("| nodes | bytes each way | link | Ray's echo | TCP echo | link / Ray's | link / TCP | limit | kept |")
        print("|---|---|---|---|---|---|---|---|---|")
        for count in sorted(options.nodes):
            for number in range(workers, count):
                here = {"head_here": number == 0, "service": "tests.remote.echo:start"}
                started.callback(start_worker(f"node-{number}", head, ROOT, [], **here).close)
                links.append(cluster.link(f"node-{number}"))
            if not workers:
                words = " ".join(below(cluster.relay().process, "raylet/raylet").cmdline())
                own = words.partition("--node_ip_address=")[2].split()[0]
                ray = started.enter_context(ray_echo(head, own))
            workers = count
            for size in SIZES:
                measured[count, size] = compared(size, links, ray, tcp, options.rounds)
        beside_tensors()
        first = min(options.nodes)
        road = fitted({size: measured[first, size] for size in SIZES})
        fan_outs(options.nodes, links, road)
        predictions(road)
        failures(head)


def compared(
    size: int, links: list[Any], ray: Callable[[int], float], tcp: Callable[[bytes], None], most: int
) -> float:
    """Print a row of the first table. Returns the median of the link."""
    import torch

    from multigpu.remote.codec import pack, unpack

    data = os.urandom(size)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0)
    turns = itertools.cycle(links)
    message = {"handle": "1", "value": tensor}
    times = []
    for _ in range(most if size <= 10 * MB else max(3, most // 4)):
        link = next(turns)
        over_link = seconds(lambda link=link: unpack(link.call("value", pack(message)), take_over=True))
        times.append((over_link, ray(size), seconds(partial(tcp, data))))
    over_link, over_ray, over_tcp = (statistics.median(column) for column in zip(*times, strict=True))
    limit = (2 + 8 * min(size, MB) / MB + 25 * max(0, size - MB) / (10 * MB)) / 1e3
    kept = over_link / over_ray <= limit / min(time for _, time, _ in times)
    row = " | ".join(f"{value * 1e3:.2f}" for value in (over_link, over_ray, over_tcp))
    ratios = f"{over_link / over_ray:.1f} | {over_link / over_tcp:.1f}"
    said = ("yes" if over_link <= limit else "as a ratio") if kept else "no"
    print(f"| {len(links)} | {size} | {row} | {ratios} | {limit * 1e3:.1f} | {said} |", flush=True)
    return over_link


def beside_tensors() -> None:
    """Bytes of messages as components send them, without those of their tensors."""
    import torch

    from multigpu.remote.codec import pack

    kept = {"new": {}, "converted": {}, "forget": []}
    options = {"cond_or_uncond": [1, 0], "uuids": [str(uuid.uuid4()) for _ in range(2)], "sigmas": torch.ones(1)}
    named = {"context": {"kept by the worker": [1, 2]}, "y": torch.ones(2, 768), "control": None}
    latent = torch.ones(2, 16, 128, 128)
    step = {"kept": kept, "positional": [latent, torch.ones(2)], "options": options, "named": named}
    messages: dict[str, Any] = {"a step of a model, two texts": step, "decoding": {"samples": latent, "options": {}}}
    for count in (77, 512, 1000):
        tokens = [(7919 * number % 32000, 1.0) for number in range(count)]
        messages[f"encoding of {count} tokens"] = {"tokens": {"t5xxl": [tokens]}, "layer": None, "projected": True}
    print("\n| message | bytes beside its tensors, at most 4096 |\n|---|---|")
    for name, value in messages.items():
        print(f"| {name} | {len(pack({'handle': 'abcdef01-1', **value}).header)} |")


def fitted(measured: dict[int, float]) -> Any:
    """The road for which three of the sizes take the time that they took; prints what it predicts for the others."""
    from multigpu.remote.scale import Road

    nothing, small, large = FITTED
    road = Road(measured[nothing], 2 * (large - small) / (measured[large] - measured[small]))
    print(f"\nA call costs {road.call * 1e3:.2f} ms, and bytes go at {road.speed / 1e6:.0f} MB/s, there and back\n")
    print("| bytes each way | ms, predicted | ms, measured | measured / predicted |\n|---|---|---|---|")
    for size in (size for size in SIZES if size not in FITTED):
        expected, took = road.seconds(size, size), measured[size]
        print(f"| {size} | {expected * 1e3:.2f} | {took * 1e3:.2f} | {took / expected:.2f} |")
    return road


def fan_outs(nodes: list[int], links: list[Any], road: Any) -> None:
    """Pictures drawn by several nodes, predicted and measured."""
    from multigpu.remote.link import Message
    from multigpu.remote.scale import fan_out_seconds

    print(f"\n{PICTURES} pictures of {PICTURE_BYTES} bytes, {COMPUTE:g} s each\n")
    print("| nodes | s, predicted | s, measured | measured / predicted | speed-up |")
    print("|---|---|---|---|---|")
    drawing = Message(str(COMPUTE).encode(), [bytes(8)])
    for count in nodes:
        expected = fan_out_seconds(PICTURES, count, COMPUTE, PICTURE_BYTES, road)
        with ThreadPoolExecutor(count) as pool:
            took = seconds(partial(fan_out, pool, links[:count], drawing))
        speed_up = PICTURES * COMPUTE / took
        print(f"| {count} | {expected:.2f} | {took:.2f} | {took / expected:.2f} | {speed_up:.1f} |", flush=True)


def fan_out(pool: ThreadPoolExecutor, links: list[Any], drawing: Any) -> None:
    """All pictures: each node draws one after the other."""

    def draw(number: int) -> None:
        for _ in range(number, PICTURES, len(links)):
            (answer,) = links[number].call("draw", drawing).buffers
            assert len(answer) == PICTURE_BYTES

    list(pool.map(draw, range(len(links))))


def predictions(here: Any) -> None:
    """Steps and fan-outs over networks: this machine's own cost, and then the network's."""
    from multigpu.remote.scale import (
        GIGABIT,
        MODELS,
        Road,
        fan_out_speed_up,
        latent_bytes,
        prompt_overhead,
        step_overhead,
    )

    roads = {f"{gigabits} GbE": here.then(Road(0.0002, gigabits * GIGABIT * 0.94)) for gigabits in (1, 10)}
    print("\nPredicted: ms that a step takes longer, and a prompt of 20 steps\n")
    columns = " | ".join(f"{name}, a step | {name}, 20 steps" for name in roads)
    print(f"| model | MB each way | MB once per prompt | {columns} |\n|---|---|---|---|---|---|---|")
    for name, sizes in MODELS.items():
        times = " | ".join(
            f"{step_overhead(sizes, road) * 1e3:.0f} | {prompt_overhead(sizes, road, 20) * 1e3:.0f}"
            for road in roads.values()
        )
        print(f"| {name} | {sizes.rows * sizes.latent / 1e6:.1f} | {sizes.conditioning / 1e6:.1f} | {times} |")
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
