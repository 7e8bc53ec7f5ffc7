"""A pack for tests of the lifecycle: calls our API over HTTP, and nodes that fail or wait. Only for tests."""

if __package__:
    from .nodes import NODE_CLASS_MAPPINGS
    from .routes import add_routes

    add_routes()
    __all__ = ["NODE_CLASS_MAPPINGS"]
