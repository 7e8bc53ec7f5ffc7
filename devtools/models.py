"""The tiny models, made once per user and kept in the cache folder."""

import sys
from collections.abc import Sequence
from pathlib import Path

from . import console, guard, hosts
from .places import Places
from .problem import from_output
from .steps import fingerprint, make_once


def folder(places: Places) -> Path:
    """Where the models of this version of their generator lie."""
    return places.cache / f"models-{fingerprint(hosts.NEWEST.version, Path(__file__).with_name('toy.py'))}"


def prepare(wanted: Sequence[hosts.Host], places: Places) -> None:
    """Have all that a server needs: the trees of these hosts, and the tiny models, which are made with the newest."""
    places.cache.mkdir(parents=True, exist_ok=True)  # where that is not possible, say so before the downloads
    for host in dict.fromkeys((*wanted, hosts.NEWEST)):
        hosts.fetch(host, places)

    def make(part: Path) -> None:
        command = [sys.executable, "-m", "devtools.toy", places.host_tree(hosts.NEWEST.version), part]
        code, text = guard.run(command, lambda line: line.endswith(" MB)") and console.detail(line), cwd=places.root)
        if code != 0:
            raise from_output(text, "the tiny models", part)

    target, title = folder(places), f"Making tiny models with random weights (0.7 GB in {places.cache})"
    make_once(target, target.name, make, places.cache / "lock", "Tiny models", title)
