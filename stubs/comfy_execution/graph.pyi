from typing import Any

class DynamicPrompt:
    original_prompt: dict[str, Any]
    ephemeral_prompt: dict[str, Any]
    ephemeral_parents: dict[str, str]
