"""The tiny models, made once per user and kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

from .console import Console
from .guard import Guarded
from .hosts import NEWEST
from .places import Places
from .problem import Problem, full_disk
from .steps import fingerprint, only_one, whole_folder


def folder(places: Places) -> Path:
    """Where the models of this version of their generator lie."""
    sources = sorted((places.root / "devtools" / "toy").glob("*.py"))
    return places.cache / f"models-{fingerprint(NEWEST.carrier_sha256, *sources)}"


def ensure(places: Places, console: Console) -> Path:
    """Have the models; the folder appears whole or not at all."""
    target = folder(places)
    with only_one(places.cache / ".models-lock", lambda: console.detail("waiting for another set-up that makes them")):
        if target.is_dir():
            console.line("  Tiny models: ready")
            return target
        with (
            console.step(f"Making tiny models with random weights (0.7 GB in {places.cache})"),
            whole_folder(target) as part,
        ):
            _make(places, part, console)
    return target


def _make(places: Places, target: Path, console: Console) -> None:
    command: list[str | Path] = [places.python, "-m", "devtools.toy", places.host_tree(NEWEST.version), target]
    lines = []
    with Guarded(command, cwd=places.root) as child:
        for raw in child.output:
            lines.append(raw.decode(errors="replace").rstrip())
            if lines[-1].endswith(" MB)"):
                console.detail(lines[-1])
        code = child.wait()
    if code != 0:
        text = "\n".join(lines)
        if "No space left" in text or "os error 28" in text:
            raise full_disk(target)
        raise Problem(f"The tiny models could not be made: {lines[-1] if lines else f'exit code {code}'}.")
