"""Plans for widgets, settings, and input that is wrong or hostile, at the routes of the panel."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from safetensors.torch import load_file

from devtools import models
from devtools.places import Places
from tests.host.driver import Driver
from tests.host.lifecycle import FILES, Keeper, short

ROUTES = ("plan", "pin", "unpin", "eject", "free", "settings", "listen")
LOOKING = ("snapshot", "history", "settings")
"""The routes that are asked with GET."""
FLUX = {"files": [FILES["model"].partition("/")[2]], "folder": "diffusion_models"}
PLACE = "MultiGPUPlaceModel"
ADVANCED = {"node": "CheckpointLoaderAdvancedDisTorch2MultiGPU"}
"""Spreads two parts of a checkpoint, each with widgets of its own."""


class Raw:
    """Requests as anybody may send them; the answers as they are."""

    def __init__(self, driver: Driver) -> None:
        self.address = driver.client.address
        self.session = requests.Session()
        self.session.trust_env = False

    def post(self, route: str, body: Any, **headers: str) -> requests.Response:
        """Bytes are sent as they are, those of an iterator in chunks without a length before them."""
        sent = body if isinstance(body, (bytes, Iterator)) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return self.session.post(f"{self.address}/multigpu/{route}", data=sent, headers=headers, timeout=60)

    def get(self, route: str, **headers: str) -> requests.Response:
        return self.session.get(f"{self.address}/multigpu/{route}", headers=headers, timeout=60)

    def bytes(self, route: str, sent: bytes) -> int:
        """The status of the answer to a POST whose body is sent as it is, in chunks that may be none."""
        where = urlsplit(self.address)
        head = f"POST /multigpu/{route} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((where.hostname, where.port), 60) as connection:
            connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + sent)
            return int(connection.recv(1000).split()[1])

    def error(self, route: str, body: Any, status: int = 400) -> dict[str, Any]:
        answer = self.post(route, body)
        assert answer.status_code == status, (route, answer.text)
        return dict(answer.json()["error"])


@pytest.fixture
def raw(keeper: Keeper) -> Iterator[Raw]:
    made = Raw(keeper)
    yield made
    made.session.close()


def widgets(mode: str = "auto", **values: Any) -> dict[str, Any]:
    return {"node": PLACE, "inputs": {"mode": mode, **values}}


# -- plans ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_from_the_header(raw: Raw, keeper: Keeper) -> None:
    wanted = widgets("expert", compute_device="cpu", expert_mode_allocations="cpu,*") | FLUX
    plan = raw.post("plan", wanted).json()["plan"]
    assert keeper.models() == [], "nothing was loaded"
    assert plan["compute"] == "cpu" and plan["homes"].keys() == {"cpu"} and (plan["ring"], plan["step"]) == (0, None)
    stored = {name: tensor.nbytes for name, tensor in load_file(keeper.server.spec.models / FILES["model"]).items()}
    assert plan["homes"]["cpu"] == sum(stored.values()) == sum(size for _, size, *_ in plan["blocks"])
    assert {name for name, *_ in plan["blocks"]} == {name.rpartition(".")[0] or name for name in stored}


@pytest.mark.parametrize(
    ("sent", "field", "column", "says"),
    [
        (widgets("expert", expert_mode_allocations="cpu,nonsense"), "expert_mode_allocations", 5, "is not an amount"),
        (widgets("expert", expert_mode_allocations="cpu,1gb; cuda:9,*"), "expert_mode_allocations", 10, "cuda:9"),
        (widgets("expert", expert_mode_allocations=""), "expert_mode_allocations", 1, "empty"),
        (widgets("virtual VRAM", donor_device="cpu,nothing:x"), "donor_device", 5, "is not a device"),
        (widgets("virtual VRAM", virtual_vram_gb="4"), "virtual_vram_gb", None, "a number"),
        (widgets("virtual VRAM", virtual_vram_gb=-1), "virtual_vram_gb", None, "a number"),
        (widgets("fast"), "mode", None, "it can be auto, virtual VRAM, expert"),
        (widgets(compute_device="cuda:7"), "compute_device", None, "not on this machine"),
        (widgets(compute_device=True), "compute_device", None, "it is a text"),
        (widgets(keep_loaded="perhaps"), "keep_loaded", None, "default, keep or eject"),
        ({"node": "UNETLoaderDisTorch2MultiGPU", "inputs": {"expert_mode_allocations": "cpu;"}},
         "expert_mode_allocations", 1, "is not 'device,amount'"),
        ({"node": "CheckpointLoaderAdvancedDisTorch2MultiGPU", "inputs": {"unet_expert_mode_allocations": "x"}},
         "unet_expert_mode_allocations", 1, "is not 'device,amount'"),
        (ADVANCED | {"inputs": {"clip_expert_mode_allocations": "cpu,x"}, "part": "clip_"},
         "clip_expert_mode_allocations", 5, "is not an amount"),
        (ADVANCED | {"inputs": {"clip_virtual_vram_gb": -1}, "part": "clip_"}, "clip_virtual_vram_gb", None,
         "a number"),
        (ADVANCED | {"inputs": {"clip_compute_device": "cuda:7"}, "part": "clip_"}, "clip_compute_device", None,
         "not on this machine"),
        (ADVANCED | {"inputs": {"vae_device": "cuda:7"}}, "vae_device", None, "not on this machine"),
        (ADVANCED | {"inputs": {}, "part": "vae_"}, None, None, "has no part 'vae_'; there are 'unet_', 'clip_'"),
        ({"node": "UNETLoader", "inputs": {}}, None, None, "none of MultiGPU's nodes"),
        ({"node": "nothing", "inputs": {}}, None, None, "none of MultiGPU's nodes"),
    ],
)  # fmt: skip
def test_a_wrong_widget_is_named_with_the_column(
    raw: Raw, sent: dict[str, Any], field: str | None, column: int | None, says: str
) -> None:
    error = raw.error("plan", sent, status=200 if field else 400)
    assert (error["field"], error["column"]) == (field, column), error
    assert says in error["message"]


def test_what_is_wrong_in_one_part_is_not_said_of_the_other(raw: Raw) -> None:
    wrong = {"inputs": {"clip_expert_mode_allocations": "x", "clip_compute_device": "cuda:7", "vae_device": "cuda:7"}}
    assert raw.error("plan", ADVANCED | wrong | {"part": "unet_"}, 200)["field"] == "vae_device", "which is no part"
    del wrong["inputs"]["vae_device"]
    for sent in (ADVANCED | wrong, ADVANCED | wrong | {"part": "unet_"}):
        assert raw.post("plan", sent).json() == {"plan": None}


def test_each_part_of_a_checkpoint_has_its_own_plan(raw: Raw, keeper: Keeper) -> None:
    name = "checkpoints/toy_sd15.safetensors"
    file = keeper.server.spec.models / name
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(models.folder(Places.here()) / name)
    inputs = {"unet_compute_device": "cpu", "clip_compute_device": "cpu"}
    sent = ADVANCED | {"inputs": inputs, "files": [file.name], "folder": "checkpoints"}
    try:
        unet, clip = [raw.post("plan", sent | {"part": part}).json()["plan"] for part in ("unet_", "clip_")]
        assert raw.post("plan", sent).json()["plan"] == unet
    finally:
        file.unlink()
    embeddings = [[reason for *_, reason in plan["blocks"]].count("embedding") for plan in (unet, clip)]
    assert embeddings[0] == 0 < embeddings[1], "only the text encoder has tables"
    assert unet["homes"].keys() == clip["homes"].keys() == {"cpu"}


def test_a_number_that_is_zero_has_no_sign(raw: Raw) -> None:
    sent = b'{"node": "MultiGPUPlaceModel", "inputs": {"mode": "virtual VRAM", "virtual_vram_gb": -0.0}}'
    assert raw.post("plan", sent).json() == {"plan": None}


def test_a_file_without_a_header_that_can_be_read_is_no_error(raw: Raw, keeper: Keeper) -> None:
    """ComfyUI may read it, and a workflow with it run: the split is not known before. No path is told."""
    folder = keeper.server.spec.models
    texts = {"vae/pixel_space": None, "vae/old.pt": b"PK", "checkpoints/old.ckpt": b"PK",
             "vae/damaged.safetensors": b"\xff" * 100, "vae/empty.safetensors": b""}  # fmt: skip
    for path, text in texts.items():
        kind, _, name = path.partition("/")
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        if text is not None:
            file.write_bytes(text)
        try:
            answer = raw.post("plan", widgets() | {"files": [name], "folder": kind})
        finally:
            file.unlink(missing_ok=True)
        assert answer.status_code == 200, name
        assert answer.json()["plan"] is None and name in answer.json()["unreadable"]
        _leaks_nothing(answer, keeper)
        wrong = widgets("fast") | {"files": [name], "folder": kind}
        assert raw.error("plan", wrong, status=200)["field"] == "mode", "the widgets are looked at first"


def test_without_files_widgets_are_only_checked(raw: Raw) -> None:
    for sent in (widgets(), widgets("expert", expert_mode_allocations="cpu,*"), widgets("virtual VRAM")):
        assert raw.post("plan", sent).json() == {"plan": None}


def test_several_text_encoders_make_one_plan(raw: Raw) -> None:
    name = FILES["clip"].partition("/")[2]
    sent = {"node": "CLIPLoaderDisTorch2MultiGPU", "inputs": {"device": "cpu"}, "files": [name], "folder": "clip"}
    plan = raw.post("plan", sent).json()["plan"]
    assert plan["homes"]["cpu"] > 100_000_000 and "embedding" in {reason for *_, reason in plan["blocks"]}


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_told_and_changed(raw: Raw, keeper: Keeper) -> None:
    before = keeper.client.get("/multigpu/settings")
    assert before == {
        "fall_back": {"value": False, "source": "default", "choices": [False, True]},
        "ram_limit": {"value": None, "source": "default", "choices": {"min": 1, "max": 100, "default": None}},
        "log_level": {"value": "info", "source": "default", "choices": ["debug", "info", "warning", "error"]},
    }
    missing = widgets(compute_device="cuda:7")
    assert raw.post("plan", missing).json()["error"]["field"] == "compute_device"
    try:
        now = raw.post("settings", {"fall_back": True, "ram_limit": 99, "log_level": "error"}).json()
        assert [now[name]["value"] for name in now] == [True, 99, "error"]
        assert {now[name]["source"] for name in now} == {"settings"}
        assert raw.post("plan", missing).json() == {"plan": None}, "it falls back"
        with keeper.said() as lines:
            keeper.run(short(222, vae="keep"))
        assert not [line for line in lines if "[MultiGPU]" in line]
    finally:
        assert raw.post("settings", dict.fromkeys(before)).json() == before
    assert raw.post("plan", missing).json()["error"]["field"] == "compute_device"


@pytest.mark.parametrize(
    "wrong",
    [{"fall_back": "perhaps"}, {"ram_limit": 101}, {"ram_limit": False}, {"ram_limit": -1}, {"log_level": "loud"},
     {"log_level": ["info"]}, {"enabled": False}, {"measure": True}],
)  # fmt: skip
def test_a_wrong_setting_changes_nothing(raw: Raw, keeper: Keeper, wrong: dict[str, Any]) -> None:
    before = keeper.client.get("/multigpu/settings")
    message = raw.error("settings", {"log_level": "debug", **wrong} if "log_level" not in wrong else wrong)["message"]
    assert next(iter(wrong)) in message
    assert keeper.client.get("/multigpu/settings") == before


# -- hostile input --------------------------------------------------------------------------------------------------

NESTED = b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NESTED_BUT_SHORT = b"[" * 60_000
WRONG = [
    b"", b"{", b"null", b"[]", b'"text"', b"1e999", b"NaN", b"\xff\xfe", b'{"a": NaN}', NESTED, NESTED_BUT_SHORT,
    b"{" + b'"a":{' * 10_000, b'{"model": "' + b"x" * 10_000_000 + b'"}', b'{"model": "x", "path": "/etc/passwd"}',
    b'{"model": ["m1"]}', b'{"model": {"id": 1}}', b'{"model": 1}', b'{"model": ""}', b'{"model": "m\\u0000"}',
    b'{"unload_models": 1}', b'{"unload_models": "true"}', b'{"client": 5}', b'{"client": "x", "on": "yes"}',
    b'{"node": 5}', b'{"node": "MultiGPUPlaceModel", "inputs": [1]}', b'{"node": "MultiGPUPlaceModel", "files": "a"}',
    b'{"node": "MultiGPUPlaceModel", "files": [["a"]], "folder": "vae"}', b'{"ram_limit": 1e400}', b'{"log_level": {}}',
]  # fmt: skip
"""Each is wrong for every route."""
GOOD = {
    "plan": {"node": PLACE}, "pin": {"model": "m1"}, "unpin": {"model": "m1"}, "eject": {"model": "m1"},
    "free": {"unload_models": True}, "settings": {"fall_back": True}, "listen": {"client": "x"},
}  # fmt: skip
CODED = [
    (b"this is no gzip", {"Content-Encoding": "gzip"}),
    (gzip.compress(b" " * 50_000_000), {"Content-Encoding": "gzip"}),
    (gzip.compress(b"[" * 60_000)[:-20], {"Content-Encoding": "gzip"}),
]
"""Bodies that their Content-Encoding makes wrong."""
CHUNKS = (b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}garbage\r\n", b"-1\r\n{}\r\n0\r\n\r\n")
"""Bodies that are no chunks."""
NAMES = ("../../comfy.settings.json", "/etc/passwd", "..", "a/../../b.safetensors", "C:\\models\\x.safetensors", "\0",
         "..\\..\\x.safetensors", "//server/share/x.safetensors", "", "nothing.safetensors", "x" * 5000)  # fmt: skip


def state(keeper: Keeper) -> tuple[Any, ...]:
    """All that a request can change: the settings, what was freed, and which models are there and stay."""
    models = keeper.client.get("/multigpu/snapshot")["models"]
    told = keeper.client.get("/multigpu/settings"), keeper.client.get("/multigpu/history")
    return *told, [(model["id"], model["standing"]) for model in models]


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_bodies_are_refused(raw: Raw, keeper: Keeper, route: str) -> None:
    keeper.run(short(221, vae="keep"))
    before = state(keeper)
    assert "keep" in {standing for *_, standing in before[-1]}
    for body, headers in (*((body, {}) for body in WRONG), *CODED):
        answer = raw.post(route, body, **headers)
        assert 400 <= answer.status_code < 500, (route, body[:60], answer.status_code, answer.text)
        _leaks_nothing(answer, keeper)
        assert answer.json()["error"]["message"]
    keeper.wait_idle()
    assert state(keeper) == before


@pytest.mark.parametrize("route", ROUTES)
def test_a_connection_that_is_lost_leaves_no_traceback(raw: Raw, keeper: Keeper, route: str) -> None:
    where = urlsplit(raw.address)
    head = f"POST /multigpu/{route} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    with keeper.said() as lines:
        for _ in range(3):
            with socket.create_connection((where.hostname, where.port), 60) as connection:
                connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
                time.sleep(0.1)  # until the server waits for the rest
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        raw.get("settings")
    assert [line for line in lines if "Traceback" in line or "ERROR" in line] == []


def test_what_fails_in_other_routes_does_not_fail_in_our_code(raw: Raw, keeper: Keeper) -> None:
    with keeper.said() as lines:
        assert raw.session.post(f"{raw.address}/prompt", data=b"{", timeout=60).status_code == 500
    assert "Traceback" in "\n".join(lines)
    assert "custom_nodes" not in "\n".join(lines)


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_sent_wrongly_are_refused(raw: Raw, keeper: Keeper, route: str) -> None:
    before = state(keeper)
    for chunks in CHUNKS:
        assert 400 <= raw.bytes(route, chunks) < 500, chunks
    endless = (b" " * 100_000 for _ in range(100))
    assert raw.post(route, endless).status_code == 413, "10 MB, and no length before them"
    good = raw.post(route, GOOD[route], **{"Content-Type": "application/json; charset=nonsense"})
    assert good.status_code == 415 and "UTF-8" in good.json()["error"]["message"]
    keeper.wait_idle()
    assert state(keeper) == before


def test_only_names_in_model_folders_are_files(raw: Raw, keeper: Keeper) -> None:
    for name in NAMES:
        answer = raw.post("plan", widgets() | {"files": [name], "folder": "diffusion_models"})
        assert answer.status_code == 400, name
        _leaks_nothing(answer, keeper)
    for folder in ("..", "/", "diffusion_models/..", "nothing", ""):
        answer = raw.post("plan", widgets() | FLUX | {"folder": folder})
        assert answer.status_code == 400, folder
        _leaks_nothing(answer, keeper)


def test_nobody_learns_which_other_files_there_are(raw: Raw, keeper: Keeper) -> None:
    """The answer for a file that is there is the one for a file that is not."""
    there = keeper.server.spec.models / "configs" / "there.safetensors"
    there.parent.mkdir(exist_ok=True)
    there.write_bytes(b"")
    text = keeper.server.spec.models / "vae" / "there.txt"
    text.write_bytes(b"")
    try:
        for folder, file, missing in (("configs", there, "none.safetensors"), ("vae", text, "none.txt"),
                                      ("custom_nodes", "multigpu/__init__.py", "multigpu/none.py")):  # fmt: skip
            name = str(getattr(file, "name", file))
            said = [raw.post("plan", widgets() | {"files": [it], "folder": folder}) for it in (name, missing)]
            assert said[0].status_code == said[1].status_code
            assert said[0].text.replace(name, missing) == said[1].text, folder
    finally:
        there.unlink()
        text.unlink()


@pytest.mark.parametrize("route", ROUTES)
def test_pages_of_other_sites_may_not_ask(raw: Raw, keeper: Keeper, route: str) -> None:
    keeper.run(short(223, vae="keep"))
    (model,) = [
        model["id"] for model in keeper.client.get("/multigpu/snapshot")["models"] if model["standing"] == "keep"
    ]
    good = GOOD[route] | ({"model": model} if "model" in GOOD[route] else {})
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://evil.example", "Host": "192.168.0.2:8188"},  # ComfyUI itself lets this pass
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ):
        answer = raw.post(route, good, **headers)
        assert answer.status_code in (403, 415), headers
    keeper.wait_idle()
    assert {"TAESD", "Flux"} <= {*keeper.names()}
    assert [row["flag"] for row in keeper.models() if row["model_class"] == "TAESD"] == [False]
    assert keeper.client.get("/multigpu/settings")["fall_back"]["value"] is False


@pytest.mark.parametrize("route", LOOKING)
def test_pages_of_other_sites_may_not_look(raw: Raw, keeper: Keeper, route: str) -> None:
    for headers in ({"Origin": "http://evil.example", "Host": "192.168.0.2:8188"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = raw.get(route, **headers)
        assert answer.status_code == 403, headers
        _leaks_nothing(answer, keeper)
    answer = raw.get(route, Origin="http://192.168.0.2:8188", Host="192.168.0.2:8188")
    assert answer.status_code == 200, "its own page, at whatever address"
    _leaks_nothing(answer, keeper)


def _leaks_nothing(answer: requests.Response, keeper: Keeper) -> None:
    spec = keeper.server.spec
    for secret in (spec.base, spec.models, spec.tree, spec.packs["multigpu"]):
        assert str(secret) not in answer.text, answer.text
    assert "Traceback" not in answer.text
