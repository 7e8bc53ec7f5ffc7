"""Entry for ComfyUI, which imports this folder as a package. Imported in any other way, it does nothing."""

if __package__:
    from .multigpu.minimums import refused

    if refused():  # before anything is imported that an old Python could not read
        NODE_CLASS_MAPPINGS = {}
    else:
        from .multigpu.entry import comfy_entrypoint, web_directory

        __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

        def __getattr__(name):
            """`WEB_DIRECTORY` is looked up by ComfyUI only: what it depends on is not found out by an import."""
            if name == "WEB_DIRECTORY":
                return web_directory()
            raise AttributeError(name)
