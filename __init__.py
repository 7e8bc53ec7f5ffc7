"""Entry for ComfyUI, which imports this folder as a package. Imported in any other way, it does nothing."""

if __package__:
    from .multigpu.host.entry import comfy_entrypoint

    WEB_DIRECTORY = "./web"

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
