"""Makes torchvision and torchaudio importable beside a torch without CUDA. Run once by the environment's Python.

The index offers one Linux wheel of each, linked against CUDA libraries. Beside a CPU torch, torchaudio does without its
native part, and torchvision only needs two operators to be declared. Nothing is changed beside a CUDA torch.
"""

import sysconfig
from pathlib import Path

import torch

DECLARED = """

if not _has_ops():  # beside a torch without CUDA
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    with (packages / "torchvision" / "extension.py").open("a", encoding="utf-8") as file:
        file.write(DECLARED)
    for library in (packages / "torchaudio" / "lib").glob("*.so"):
        if b"libc10_cuda" in library.read_bytes():
            library.unlink()
    for record in packages.glob("torchaudio-*.dist-info/RECORD"):  # what it lists is looked for later
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        record.write_text("".join(line for line in lines if (packages / line.partition(",")[0]).exists()), "utf-8")


if __name__ == "__main__" and torch.version.cuda is None:
    main()
