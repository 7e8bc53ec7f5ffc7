"""A custom node pack for tests: shows and sets the simulated devices of a ComfyUI process under `/simdev`.

In a process without simulated devices (the reference run on the CPU) it makes ComfyUI choose number types as on a GPU,
so that the results can be compared bit for bit.
"""

import sys

from .nodes import NODE_CLASS_MAPPINGS
from .routes import add_routes
from .types import choose_types_as_on_a_gpu

if "simdev" in sys.modules:
    add_routes(sys.modules["simdev"].current())
else:
    choose_types_as_on_a_gpu()

__all__ = ["NODE_CLASS_MAPPINGS"]
