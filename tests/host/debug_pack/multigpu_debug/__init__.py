"""A pack for tests: reports what really is in a ComfyUI process, under `/debug/`. It changes nothing.

The driver makes ComfyUI load it before any other pack, so that its snapshot of the host is the host as it ships.
"""

if __package__:
    from .routes import add_routes
    from .snapshot import Snapshot

    add_routes(Snapshot.of_the_host())

    NODE_CLASS_MAPPINGS: dict = {}
