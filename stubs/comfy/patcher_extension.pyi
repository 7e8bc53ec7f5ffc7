from collections.abc import Callable
from typing import Any

class CallbacksMP:
    ON_LOAD: str
    ON_CLONE: str

class WrappersMP:
    APPLY_MODEL: str
    CALC_COND_BATCH: str

class WrapperExecutor:
    class_obj: Any
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def merge_nested_dicts(dict1: dict[str, Any], dict2: dict[str, Any]) -> dict[str, Any]: ...
