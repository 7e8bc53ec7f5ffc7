class Arguments:
    cache_classic: bool
    cache_none: bool
    cache_lru: int

args: Arguments
