from collections.abc import Callable
from typing import Any, ClassVar

from execution import PromptQueue

class PromptServer:
    instance: ClassVar[PromptServer]
    prompt_queue: PromptQueue
    app: Any
    routes: Any
    sockets: dict[str, Any]
    def add_on_prompt_handler(self, handler: Callable[[Any], Any]) -> None: ...
