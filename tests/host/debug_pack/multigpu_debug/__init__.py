"""A pack for tests: reports what really is in a ComfyUI process, under `/debug/`. It changes nothing of the host.

The driver makes ComfyUI load it before any other pack, so that its snapshot of the host is the host as it ships. What
was imported by then is taken out of the garbage collector's rounds: nobody lets go of it, and each round costs a
third of a second with it.
"""

import gc

if __package__:
    from .routes import add_routes
    from .snapshot import Snapshot

    add_routes(Snapshot.of_the_host())
    gc.freeze()

    NODE_CLASS_MAPPINGS: dict = {}
