class Arguments:
    cache_classic: bool
    cache_none: bool
    cache_lru: int
    enable_cors_header: str | None

args: Arguments
