from typing import Any

class CONDRegular:
    def __init__(self, cond: Any) -> None: ...
