from collections.abc import Sequence
from typing import Any

import torch

def calculate_shape(patches: Sequence[Any], weight: torch.Tensor, key: str) -> torch.Size: ...
