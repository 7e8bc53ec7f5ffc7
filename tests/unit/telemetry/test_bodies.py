"""Bodies of requests: what is right is read, and every mistake is answered by what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from multigpu.errors import RequestError
from multigpu.telemetry import bodies


def refused(call: Callable[[], Any], status: int = 400) -> str:
    with pytest.raises(RequestError) as problem:
        call()
    assert problem.value.status == status
    assert problem.value.to_json() == {"error": {"message": str(problem.value), "field": None, "column": None}}
    return str(problem.value)


def test_an_object_is_read() -> None:
    assert bodies.read_body('{"a": [1, "ü"]}'.encode()) == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "is not JSON"), (b"{", "is not JSON"), (b"\xff", "is not JSON"), (b'{"a": NaN}', "NaN is not a number"),
        (b"[]", "a list of 0"), (b"null", "None"), (b'"x"', "'x'"), (b"[" * 60_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(sent: bytes, says: str) -> None:
    assert says in refused(lambda: bodies.read_body(sent))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "127.0.0.1:8188"), ("http://127.0.0.1:8188", "127.0.0.1:8188"),
        ("https://Comfy.example", "comfy.example"), ("https://comfy.example", "comfy.example:443"),
        ("http://[::1]:8188", "[::1]:8188"),
    ],
)  # fmt: skip
def test_the_own_page_and_scripts_may_ask(origin: str | None, host: str) -> None:
    bodies.check_origin(origin, host)


def test_the_origin_that_comfyui_was_told_to_allow_may_ask() -> None:
    for allowed in ("https://other.example", "*"):
        bodies.check_origin("https://other.example", "192.168.0.2:8188", allowed)
        bodies.check_origin("http://192.168.0.2:8188", "192.168.0.2:8188", allowed)
    refused(lambda: bodies.check_origin("http://evil.example", "192.168.0.2:8188", "https://other.example"), 403)


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://127.0.0.1:1", "http://127.0.0.1", "http://[", "file://", "http://a:b"],
)
def test_other_pages_may_not(origin: str) -> None:
    assert "another site" in refused(lambda: bodies.check_origin(origin, "127.0.0.1:8188"), 403)
    refused(lambda: bodies.check_origin(origin or "x://y", None), 403)


def test_a_form_is_not_json() -> None:
    bodies.check_type("application/json")
    assert "send application/json" in refused(lambda: bodies.check_type("text/plain"), 415)


def test_json_is_utf_8() -> None:
    bodies.check_type("application/json", "UTF-8")
    for charset in ("latin-1", "nonsense"):
        assert "send UTF-8" in refused(lambda charset=charset: bodies.check_type("application/json", charset), 415)  # type: ignore[misc]


def test_what_is_to_be_freed() -> None:
    assert bodies.read_free({"free_memory": True}) == bodies.FreeBody(unload_models=False, free_memory=True)
    assert "nothing is to be freed" in refused(lambda: bodies.read_free({}))
    assert "send true or false" in refused(lambda: bodies.read_free({"free_memory": 1}))
    assert "there is no field 'all'" in refused(lambda: bodies.read_free({"all": True}))


def test_a_model_is_named_by_a_text() -> None:
    assert bodies.read_model({"model": "m1"}) == "m1"
    for wrong in ({}, {"model": ""}, {"model": 1}, {"model": ["m1"]}, {"model": None}, {"model": "m" * 5000}):
        assert "send a text" in refused(lambda wrong=wrong: bodies.read_model(wrong))  # type: ignore[misc]


def test_who_listens() -> None:
    assert bodies.read_listen({"client": "c"}) == bodies.ListenBody("c", on=True)
    assert bodies.read_listen({"client": "c", "on": False}) == bodies.ListenBody("c", on=False)


def test_what_a_plan_is_made_of() -> None:
    sent = {
        "node": "n",
        "inputs": {"a": 1, "link": ["4", 0], "none": None},
        "files": ["x/y.safetensors"],
        "folder": "vae",
    }
    assert bodies.read_plan(sent) == bodies.PlanBody("n", {"a": 1}, ("x/y.safetensors",), "vae"), "links are no values"
    assert bodies.read_plan({"node": "n"}) == bodies.PlanBody("n", {}, (), "")
    assert "folder" in refused(lambda: bodies.read_plan({"node": "n", "files": ["x"]}))
    assert "inputs is a list of 1" in refused(lambda: bodies.read_plan({"node": "n", "inputs": [1]}))
    assert "list of at most 64 file names" in refused(lambda: bodies.read_plan({"node": "n", "files": ["x"] * 65}))
    assert "longer than 4096" in refused(lambda: bodies.read_plan({"node": "n", "inputs": {"a": "x" * 5000}}))


@pytest.mark.parametrize("name", ["a.safetensors", "sub/a.gguf", "sub\\a.gguf", "a b..c.safetensors", "ü.sft", ".a"])
def test_names_of_files(name: str) -> None:
    bodies.check_file_name(name)


@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/../b", "a\\..\\b", "/a", "\\a", "a//b", "C:a", "C:\\a", "a\0", "a/", "x" * 5000]
)
def test_paths_are_no_names(name: str) -> None:
    message = refused(lambda: bodies.check_file_name(name))
    assert "is not the name of a file in a model folder" in message and len(message) < 200


def test_messages_are_short_and_printable() -> None:
    assert bodies.shown("\x1b[2J" + "ü" * 1000) == ascii("\x1b[2J" + "ü" * 1000)[:60] + "..."
    assert json.dumps(bodies.shown([1, 2])) == '"[1, 2]"'
