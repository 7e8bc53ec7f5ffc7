"""Looking at a ComfyUI tree from a plain process, without starting its server."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ..errors import InputError

PACK_FOLDER = Path(__file__).resolve().parents[2]


def find_tree() -> Path | None:
    """The ComfyUI that this pack is installed in, when it lies in a `custom_nodes` folder."""
    candidate = PACK_FOLDER.parent.parent
    return candidate if PACK_FOLDER.parent.name == "custom_nodes" and _is_tree(candidate) else None


def enter(tree: Path) -> None:
    """Make the tree's modules importable here. Once per process; raises InputError when it is not a ComfyUI folder."""
    if not _is_tree(tree):
        raise InputError(
            f"{tree} is not a ComfyUI folder (no comfy/model_management.py in it); give the one with main.py"
        )
    sys.path.insert(0, str(tree))
    kept = sys.argv[1:]
    try:
        import comfy.options
        import torch

        sys.argv[1:] = [] if torch.accelerator.is_available() else ["--cpu"]
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
    return (folder / "comfy" / "model_management.py").is_file()
