"""The bodies of requests to our HTTP routes: read strictly, because anybody may have sent them.

Every problem is a `RequestError` that says what was given and what is allowed. It repeats only what was sent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..errors import RequestError

MOST_BYTES = 64 * 1024
"""Of one body."""
_LONGEST_TEXT = 4096
_MOST_FILES = 64
_USUAL_PORTS = {"http": 80, "https": 443}

Value = str | int | float | bool
"""What a widget can hold."""


def check_origin(origin: str | None, host: str | None, allowed: str | None = None) -> None:
    """Refuse a request that a page of another site makes in somebody's browser. Scripts send no origin.

    `allowed` is the origin that ComfyUI was told to allow; `*` are all.
    """
    if origin is None or allowed in ("*", origin):
        return
    try:
        same = bool(host) and _is_at(urlsplit(origin), urlsplit(f"//{host}"))
    except ValueError:
        same = False
    if not same:
        raise RequestError("this request comes from another site; use the page of this ComfyUI", status=403)


def _is_at(page: SplitResult, host: SplitResult) -> bool:
    """Whether a page is at a host. Browsers leave out the usual port, proxies may name it."""
    usual = _USUAL_PORTS.get(page.scheme)
    return bool(page.hostname) and (page.hostname, page.port or usual) == (host.hostname, host.port or usual)


def check_type(content_type: str, charset: str | None = None) -> None:
    """A form on another site can send text, but not JSON, without the browser asking this server first."""
    if content_type != "application/json":
        raise RequestError(f"the body is {shown(content_type)}; send application/json", status=415)
    if charset is not None and charset.lower() not in ("utf-8", "utf8"):
        raise RequestError(f"the body is in {shown(charset)}; send UTF-8", status=415)


def broken() -> RequestError:
    return RequestError("the body cannot be read: it is not as its Content-Encoding or Transfer-Encoding says")


def too_large() -> RequestError:
    return RequestError(f"the body is larger than {MOST_BYTES} bytes", status=413)


def read_body(text: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        body = json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send one JSON object") from None
    except ValueError as problem:
        raise RequestError(f"the body is not JSON ({problem}); send one JSON object") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {_kind(body)}; send one JSON object")
    return body


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


@dataclass(frozen=True, slots=True)
class FreeBody:
    unload_models: bool
    free_memory: bool


@dataclass(frozen=True, slots=True)
class ListenBody:
    client: str
    on: bool


@dataclass(frozen=True, slots=True)
class PlanBody:
    """The widget values of one node, and the files of the model that it gets: names in one of the host's folders.

    `part` is what the names of the widgets begin with that are meant, if the node has several parts; None: the first.
    """

    node: str
    inputs: Mapping[str, Value]
    files: tuple[str, ...]
    folder: str
    part: str | None = None


def read_model(body: dict[str, Any]) -> str:
    _check_names(body, ("model",))
    return _text(body, "model")


def read_free(body: dict[str, Any]) -> FreeBody:
    _check_names(body, ("unload_models", "free_memory"))
    wanted = FreeBody(_flag(body, "unload_models", False), _flag(body, "free_memory", False))
    if not wanted.unload_models and not wanted.free_memory:
        raise RequestError("nothing is to be freed; set unload_models, free_memory or both to true")
    return wanted


def read_listen(body: dict[str, Any]) -> ListenBody:
    _check_names(body, ("client", "on"))
    return ListenBody(_text(body, "client"), _flag(body, "on", True))


def read_plan(body: dict[str, Any]) -> PlanBody:
    _check_names(body, ("node", "inputs", "files", "folder", "part"))
    inputs, files = body.get("inputs", {}), body.get("files", [])
    if not isinstance(inputs, dict):
        raise RequestError(f"inputs is {_kind(inputs)}; send an object of widget values by name")
    values = {name: value for name, value in inputs.items() if isinstance(value, (str, int, float, bool))}
    if any(isinstance(value, str) and len(value) > _LONGEST_TEXT for value in values.values()):
        raise RequestError(f"a widget's text is longer than {_LONGEST_TEXT} characters")
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files) or len(files) > _MOST_FILES:
        raise RequestError(f"files is {_kind(files)}; send a list of at most {_MOST_FILES} file names")
    for name in files:
        check_file_name(name)
    folder = _text(body, "folder", None if files else "")
    part = _text(body, "part", "") if "part" in body else None
    return PlanBody(_text(body, "node"), values, tuple(files), folder, part)


def check_file_name(name: str) -> None:
    """Refuse what is not a name inside a folder."""
    parts = name.replace("\\", "/").split("/")
    if not name or len(name) > _LONGEST_TEXT or ".." in parts or "" in parts or ":" in name or "\0" in name:
        raise RequestError(f"{shown(name)} is not the name of a file in a model folder; send it as the loader has it")


def _check_names(body: dict[str, Any], known: Collection[str]) -> None:
    unknown = [name for name in body if name not in known]
    if unknown:
        raise RequestError(f"there is no field {shown(unknown[0])}; there are {', '.join(known)}")


def _text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or (not value and default is None):
        what = "missing" if name not in body else _kind(value)
        raise RequestError(f"{name} is {what}; send a text of 1 to {_LONGEST_TEXT} characters")
    return value


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {_kind(value)}; send true or false")
    return value


def _kind(value: object) -> str:
    """What a JSON value is, for a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    return shown(value)


def shown(value: object) -> str:
    """A value as a message shows it: without control characters, and cut short."""
    text = ascii(value[:61] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:60]}..."
