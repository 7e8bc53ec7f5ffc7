"""The pictures of README and docs can be taken again. MULTIGPU_PICTURES=on puts them into assets/."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts import pictures


@pytest.mark.once
def test_the_pictures_of_the_panel_are_taken(frontend: Any, browser: Any, tmp_path: Path) -> None:
    folder = pictures.FOLDER if os.environ.get("MULTIGPU_PICTURES") == "on" else tmp_path
    pictures.take_all(browser, folder)
    whole = (pictures.SIZE["width"], pictures.SIZE["height"])
    for name in pictures.NAMES:
        with Image.open(folder / name) as taken:
            assert taken.size == whole if name.startswith("panel") else taken.width < whole[0]
            assert len(taken.convert("RGB").getcolors(taken.width * taken.height)) > 100, "it shows something"
        assert (pictures.FOLDER / name).is_file()


@pytest.mark.once
def test_the_pictures_are_of_this_panel(frontend: Any) -> None:
    stored = (pictures.FOLDER / pictures.DIGEST).read_text()
    assert stored == pictures.digest(), "they are older: run `.venv/bin/python -m scripts.pictures CHROMIUM`"
