"""What two machines tell each other before they work together, and what must be the same on both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RemoteMismatch
from ..units import format_bytes

SHOWN = 6
"""How many differences a message names."""


@dataclass(frozen=True, slots=True)
class FileFact:
    """A model file: its kind and name below its model folder with `/`, its size, and a hash of its header.

    The hash is empty where the file was not opened for it.
    """

    name: str
    size: int
    header: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine: the versions of what runs there, and which of the nodes and files that are asked about it has."""

    where: str
    versions: Mapping[str, str]
    nodes: frozenset[str]
    files: tuple[FileFact, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As a value that can be sent."""
        return {
            "where": self.where,
            "versions": dict(self.versions),
            "nodes": sorted(self.nodes),
            "files": [[its.name, its.size, its.header] for its in self.files],
        }

    @classmethod
    def read(cls, plain: Any) -> Facts:
        """The facts that were sent. Raises `RemoteMismatch` if they are in another form."""
        try:
            files = tuple(FileFact(str(name), int(size), str(header)) for name, size, header in plain["files"])
            versions = {str(name): str(version) for name, version in plain["versions"].items()}
            return cls(str(plain["where"]), versions, frozenset(map(str, plain["nodes"])), files)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise RemoteMismatch(
                "another machine tells its versions and files in another form than this one; install the same version "
                "of MultiGPU on both"
            ) from None


def normal_name(name: str) -> str:
    """The name of a model file with the separators of every system as `/`."""
    return name.replace("\\", "/")


def check(here: Facts, there: Facts) -> None:
    """Raises `RemoteMismatch`, with what each side has, unless `there` can do what `here` asks for."""
    found = [*_versions(here, there), *_nodes(here, there), *_files(here, there)]
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise RemoteMismatch(f"{there.where} is not like {here.where}: {'; '.join(found[:SHOWN])}{more}")


def ray_mismatch(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Why this machine cannot join a cluster, from the versions of Ray and Python on both sides; empty if it can.

    Ray must be the same, of Python the first two numbers.
    """
    found = []
    if theirs["Ray"] != ours["Ray"]:
        found.append(
            f"its Ray is {theirs['Ray']} and that of this machine {ours['Ray']}; pip install ray=={theirs['Ray']} "
            f"here, or ray=={ours['Ray']} on all other machines"
        )
    if _minor(theirs["Python"]) != _minor(ours["Python"]):
        found.append(
            f"its Python is {theirs['Python']} and that of this machine {ours['Python']}; run ComfyUI and its workers "
            "with the same minor version of Python on all machines"
        )
    return "; ".join(found)


def _minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def _versions(here: Facts, there: Facts) -> Iterator[str]:
    for name in sorted({*here.versions, *there.versions}):
        ours, theirs = here.versions.get(name, "none"), there.versions.get(name, "none")
        if _release(ours) != _release(theirs):
            yield f"{name} is {theirs} on {there.where} and {ours} on {here.where}; install the same version on both"


def _release(version: str) -> str:
    """A version without the build: torch 2.9.0+cpu and 2.9.0+cu128 are one release."""
    return version.partition("+")[0]


def _nodes(here: Facts, there: Facts) -> Iterator[str]:
    for node in sorted(here.nodes - there.nodes):
        yield f"the node {node} is not on {there.where}; install the pack that provides it there"


def _files(here: Facts, there: Facts) -> Iterator[str]:
    theirs = {its.name: its for its in there.files}
    for ours in here.files:
        its = theirs.get(ours.name)
        if its is None:
            yield f"{there.where} has no {ours.name} ({format_bytes(ours.size)} on {here.where}); copy it there"
        elif its.size != ours.size:
            yield (
                f"{ours.name} has {its.size} bytes on {there.where} and {ours.size} on {here.where}; "
                "use the same file on both"
            )
        elif its.header and ours.header and its.header != ours.header:
            yield (
                f"{ours.name} has another header on {there.where} ({its.header[:12]}) than on {here.where} "
                f"({ours.header[:12]}); use the same file on both"
            )
