"""Entry for ComfyUI, which imports this folder as a package. Imported in any other way, it does nothing."""

if __package__:
    from .multigpu.host.entry import comfy_entrypoint

    __all__ = ["comfy_entrypoint"]
