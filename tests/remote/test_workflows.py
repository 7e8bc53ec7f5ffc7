"""A worker started by its command, a ComfyUI that knows its cluster, and workflows over both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from devtools import models
from devtools.client import Workflow
from devtools.hosts import NEWEST, Frontend
from devtools.places import Places
from devtools.server import Server, ServerSpec, prepare_base
from tests.host.driver import Driver, spec_for
from tests.host.workflows import flux, placed
from tests.remote.processes import Descendants, until

NODE_B = "ray://node-b/cpu"


def remote(seed: int) -> Workflow:
    """Flux with every component on the other machine."""
    workflow = flux(seed)
    for part in ("model", "clip", "vae"):
        workflow = placed(workflow, part, compute_device=NODE_B)
    return workflow


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`multigpu worker --head-here` with the address of its head, ready. It leaves nothing behind."""
    places, base = Places.here(), tmp_path_factory.mktemp("node-b")
    with socket.create_server(("127.0.0.4", 0)) as free:
        head = f"127.0.0.4:{free.getsockname()[1]}"
    prepare_base(
        ServerSpec(
            tree=places.root, python=Path(sys.executable), base=base, models=models.folder(places),
            packs={"multigpu": places.root},
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "multigpu", "worker", "--name=node-b", f"--head={head}", "--head-here"]
    command += ["--comfyui", str(places.host_tree(NEWEST.version)), "--", "--cpu", "--base-directory", str(base)]
    command += ["--database-url", "sqlite:///:memory:", "--disable-api-nodes"]
    command += ["--extra-model-paths-config", str(base / "extra_paths.yaml")]
    command += ["--front-end-root", str(Frontend(NEWEST).files(places))]
    started = Descendants()
    process = subprocess.Popen(command, cwd=places.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().decode() for _ in range(3)]
        assert said[1:] == ["node-b is ready. It offers\n", said[2]] and said[2].startswith(f"  {NODE_B} "), said
        yield head, process
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert started.left() == []


@pytest.fixture(scope="module")
def comfy(worker: tuple[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    environment = {
        "MULTIGPU_RAY": worker[0], "RAY_AUTH_TOKEN_PATH": os.environ["RAY_AUTH_TOKEN_PATH"],
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }  # fmt: skip
    spec = spec_for(NEWEST, tmp_path_factory.mktemp("here"), Path(sys.executable), environment=environment)
    with Server(spec) as server:
        yield Driver(server)


def test_the_worker_draws_what_is_drawn_here(comfy: Driver) -> None:
    assert comfy.draw(remote(1)) == comfy.draw(flux(1))


def test_no_port_of_the_worker_answers_http_requests(worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    """ComfyUI's own server is not there. The ports are Ray's, which asks for the token."""
    tree = psutil.Process(worker[1].pid).children(recursive=True)
    actor = next(each for each in tree if "ray::Worker" in " ".join(each.cmdline()))
    listening = [each.laddr.port for each in actor.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    for port in listening:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /system_stats HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.settimeout(5)
            assert not connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_next_prompt_builds_again_what_a_killed_worker_had(
    comfy: Driver, worker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    tree = psutil.Process(worker[1].pid).children(recursive=True)
    actor = next(each for each in tree if "ray::Worker" in " ".join(each.cmdline()))
    actor.kill()
    drawn = []

    def draws() -> bool:
        try:
            drawn.append(comfy.draw(remote(2)))
        except Exception as error:  # noqa: BLE001  the driver's own, about a prompt that failed
            assert "RemoteDeviceLost" in str(error)
        return bool(drawn)

    assert until(draws)
    assert drawn == [comfy.draw(flux(2))]
