"""All that has to be there before anything can run, in order; quick when it is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from . import environment, fetch, models
from .console import Console
from .hosts import NEWEST, Host
from .places import Places
from .steps import only_one


def prepare(hosts: Sequence[Host], places: Places, console: Console) -> None:
    """The environment, these hosts and the tiny models. A run that was killed is continued where it stopped."""
    with _alone(places, console):
        environment.ensure(places, console)
        for host in hosts:
            fetch.ensure(host, places, console)
        if NEWEST not in hosts:
            fetch.ensure_tree(NEWEST, places, console)  # the models take their shapes from it
        models.ensure(places, console)


def prepare_environment(places: Places, console: Console) -> None:
    """Only the Python environment: enough for lint, types and unit tests."""
    with _alone(places, console):
        environment.ensure(places, console)


def _alone(places: Places, console: Console) -> contextlib.AbstractContextManager[None]:
    waiting = "  Waiting for another dev.py in this clone to finish its set-up"
    return only_one(places.dev / "lock", lambda: console.line(waiting))
