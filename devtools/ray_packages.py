"""Ray, for the tests of other machines. In a folder of its own: everything else must work without it."""

from pathlib import Path

from .environment import pip
from .places import Places
from .steps import fingerprint, make_once


def install(places: Places) -> Path:
    """Have Ray, and what it needs beside `.venv`, in `.dev/`. Returns the folder, for PYTHONPATH."""
    target, pins, name = places.dev / "ray", places.requirements / "ray.txt", "Ray"

    def make(part: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", part]
        pip(places, ["install", *options, "-r", pins], what=name)

    title = f"Installing {name} (80 MB, 250 MB on disk, checked against its hashes)"
    make_once(target, fingerprint(pins), make, places.dev / "lock", name, title)
    return target
