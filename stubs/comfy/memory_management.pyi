from collections.abc import Callable
from typing import Any

extra_ram_release_callback: Callable[..., Any] | None

def extra_ram_release(target: int, free_active: bool = ...) -> Any: ...
