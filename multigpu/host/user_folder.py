"""Where this pack may keep a file of its own, and what ComfyUI has saved of its settings dialog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folder_paths


def user_folder() -> Path:
    """A folder in ComfyUI's user directory that its web server does not give out. It may not exist yet."""
    return Path(folder_paths.get_system_user_directory("multigpu"))


def saved_text(name: str) -> str:
    """What a file in that folder says; nothing if it is missing or cannot be read."""
    try:
        return (user_folder() / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def saved_settings() -> dict[str, Any]:
    """What ComfyUI has saved, by the ids in its settings dialog; nothing if the file is missing or damaged.

    Where several people have settings of their own (`--multi-user`), those of its user `default` are meant.
    """
    try:
        file = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}
