"""Replacements in the host are objects that can be installed and removed, and that refuse politely."""

from __future__ import annotations

import subprocess
import sys

from devtools.hosts import Host
from devtools.places import Places

CASES = """
import sys
from pathlib import Path
root, tree = sys.argv[1:3]
sys.path.insert(0, root)
from multigpu.host import comfyui_tree
comfyui_tree.enter(Path(tree))
import comfy.model_management as mm
from multigpu.errors import HostIncompatible
from multigpu.host.replacements import Replacement

def complaint_of(replacement):
    before = getattr(replacement.owner, replacement.name, None)
    try:
        replacement.install()
    except HostIncompatible as problem:
        assert getattr(replacement.owner, replacement.name, None) is before, "refused, and yet changed something"
        return str(problem)
    raise AssertionError("installed")

calls = []
def ours(force=False):
    calls.append(force)
    return replacement.original(force)

host = mm.soft_empty_cache
replacement = Replacement(mm, "soft_empty_cache", ("force",), "a test", ours)
assert not replacement.installed
replacement.install(); replacement.install()
assert replacement.installed and mm.soft_empty_cache is ours
mm.soft_empty_cache(True)
assert calls == [True]
replacement.remove(); replacement.remove()
assert mm.soft_empty_cache is host and not replacement.installed

replacement.install()
later = lambda force=False: ours(force)
mm.soft_empty_cache = later
replacement.install()
assert mm.soft_empty_cache is later, "a pack that came later is left alone"
replacement.remove()
assert mm.soft_empty_cache is later
mm.soft_empty_cache = host
replacement.install()
assert mm.soft_empty_cache is ours, "put back after someone removed it"
replacement.remove()
assert mm.soft_empty_cache is host

assert complaint_of(Replacement(mm, "soft_empty_cache", ("force", "more"), "", ours)) == (
    "comfy.model_management.soft_empty_cache has the parameters (force), expected (force, more)")
assert complaint_of(Replacement(mm, "no_such", (), "", ours)) == "comfy.model_management.no_such is missing"
mm.soft_empty_cache = later
assert "was replaced by another pack (__main__)" in complaint_of(
    Replacement(mm, "soft_empty_cache", ("force",), "", ours)
)
"""


def test_install_remove_and_refuse(host: Host) -> None:
    places = Places.here()
    command = [sys.executable, "-c", CASES, str(places.root), str(places.host_tree(host.version))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
