"""Makes torchvision and torchaudio importable beside a torch without CUDA. Run as a script by the environment's Python.

The index offers one Linux wheel of each, linked against CUDA libraries. Beside a CPU torch, torchaudio does without its
native part, and torchvision only needs two operators to be declared. Nothing is changed beside a CUDA torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

MARK = "# declared for a torch without CUDA"

SHIM = f"""

{MARK}
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    import torch

    if torch.version.cuda is not None:
        return
    vision, audio = _folder("torchvision"), _folder("torchaudio")
    extension = vision / "extension.py"
    if MARK not in extension.read_text(encoding="utf-8"):
        with extension.open("a", encoding="utf-8") as file:
            file.write(SHIM)
    for library in (audio / "lib").glob("*.so"):
        if b"libc10_cuda" in library.read_bytes():
            library.unlink()
    for record in audio.parent.glob("torchaudio-*.dist-info/RECORD"):  # what it lists is looked for later
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        record.write_text("".join(line for line in lines if (audio.parent / line.partition(",")[0]).exists()), "utf-8")


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
