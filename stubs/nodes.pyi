from typing import Any

NODE_CLASS_MAPPINGS: dict[str, Any]
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str]

class UNETLoader:
    FUNCTION: str
    RETURN_TYPES: tuple[str, ...]
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]: ...
