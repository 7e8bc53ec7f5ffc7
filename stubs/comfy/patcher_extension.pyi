class CallbacksMP:
    ON_LOAD: str
    ON_CLONE: str
