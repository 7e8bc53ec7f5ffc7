"""Looking at a ComfyUI tree from a plain process, without starting its server."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import InputError


def find_tree() -> Path | None:
    """The ComfyUI that the current folder lies in, or the one that this pack was imported from; None if neither is one.

    The pack may be a symbolic link in `custom_nodes`. Then only the unresolved path leads to ComfyUI: the shell keeps
    that of the current folder in PWD, Python that of an import in `__file__`.
    """
    folders = [*_current_folder(), Path(__file__).absolute()]
    return next((tree for folder in folders for tree in (folder, *folder.parents) if _is_tree(tree)), None)


def _current_folder() -> Iterator[Path]:
    """The current folder as PWD names it; if PWD is another folder, as the operating system names it."""
    with suppress(OSError):  # PWD is not there
        named = os.environ.get("PWD", "")
        if os.path.isabs(named) and os.path.samefile(named, os.curdir):
            yield Path(named)
    with suppress(OSError):  # the folder is gone
        yield Path.cwd()


def enter(tree: Path) -> None:
    """Make the tree's modules importable here. Once per process; raises InputError when it is not a ComfyUI folder."""
    tree = Path(os.path.realpath(tree))
    if not _is_tree(tree):
        raise InputError(
            f"{tree} is not a ComfyUI folder (no comfy/model_management.py in it); give the one with main.py"
        )
    sys.path.insert(0, str(tree))
    kept = sys.argv[1:]
    try:
        import comfy.options

        from ..devices.inventory import Inventory

        sys.argv[1:] = [] if Inventory().accelerators else ["--cpu"]
        comfy.options.enable_args_parsing()
        import comfy.cli_args

        importlib.import_module("utils.install_util")  # before `nodes` puts another `utils` in front, as main.py does
    except ImportError as error:
        raise InputError(
            f"{sys.executable} lacks what ComfyUI needs ({error}); use the Python that runs ComfyUI"
        ) from error
    finally:
        sys.argv[1:] = kept


def _is_tree(folder: Path) -> bool:
    return os.path.isfile(folder / "comfy" / "model_management.py")
