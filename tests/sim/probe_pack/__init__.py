"""A custom node pack for tests: shows and sets the simulated devices of a ComfyUI process under `/simdev`.

In a process without simulated devices (the reference run on the CPU) it makes ComfyUI choose number types as on a GPU,
and compute with them as the simulated devices do, so that the results can be compared bit for bit.
"""

import sys
from pathlib import Path

from .nodes import NODE_CLASS_MAPPINGS
from .routes import add_routes
from .types import choose_types_as_on_a_gpu

if "simdev" in sys.modules:
    add_routes(sys.modules["simdev"].current())
else:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from simdev.sixteen_bits import compute_in_32_bits

    choose_types_as_on_a_gpu()
    compute_in_32_bits()

__all__ = ["NODE_CLASS_MAPPINGS"]
