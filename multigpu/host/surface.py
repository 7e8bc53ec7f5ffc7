"""Every symbol of the host that this project uses, what is expected of it, and what it is used for.

A test checks that code in `host/` uses no other symbol. When a host version changes one, the feature that needs it is
turned off, with a log line that names the symbol. `multigpu doctor --all` prints the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Feature(Enum):
    """What stops working when a symbol is not as expected. The value is what people read."""

    NODES = "nodes"
    PLACEMENT = "placement"
    DEVICES = "device choice"
    LIFECYCLE = "keep and eject"


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol: `path` inside `module`, the features that need it, and the reason.

    `positional` are the parameters a callable must begin with, in order, `self` left out. `keywords` are parameters it
    must have anywhere.
    """

    module: str
    path: str
    feature: Feature
    why: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"


_PATCHER = "comfy.model_patcher"
_MEMORY = "comfy.model_management"
_N, _P, _D, _L = Feature.NODES, Feature.PLACEMENT, Feature.DEVICES, Feature.LIFECYCLE

SURFACE: tuple[Symbol, ...] = (
    Symbol("comfy_api.latest", "ComfyExtension", _N, "what the entry point returns"),
    Symbol("comfy_api.latest", "io.ComfyNode", _N, "base of our nodes"),
    Symbol("comfy_api.latest", "io.Schema", _N, "inputs and outputs of our nodes",
           keywords=("node_id", "inputs", "outputs")),
    Symbol("comfy_api.latest", "ui.PreviewText", _N, "the text of Memory Report among a prompt's outputs", ("value",)),
    Symbol("comfy.options", "enable_args_parsing", _N, "multigpu doctor: imports the host on a machine without GPU"),
    Symbol("nodes", "NODE_CLASS_MAPPINGS", _N, "loaders of the host and of other packs, looked up when a node runs"),
    Symbol("folder_paths", "get_full_path_or_raise", _N, "the file behind a name", ("folder_name", "filename")),
    Symbol("folder_paths", "get_folder_paths", _N, "where embeddings are, for a checkpoint", ("folder_name",)),
    Symbol("folder_paths", "get_filename_list", _N, "the choices of a loader", ("folder_name",)),
    # The engine is a mixin over the static patcher: what it overrides, what it calls through to.
    Symbol(_PATCHER, "ModelPatcher", _P, "base of the placed patcher", ("model", "load_device", "offload_device")),
    Symbol(_PATCHER, "ModelPatcher.load", _P, "overridden: places blocks by the plan",
           ("device_to", "lowvram_model_memory", "force_patch_weights", "full_load")),
    Symbol(_PATCHER, "ModelPatcher.partially_load", _P, "overridden: a plan is applied whole",
           ("device_to", "extra_memory", "force_patch_weights")),
    Symbol(_PATCHER, "ModelPatcher.partially_unload", _P, "overridden: what leaves the compute device is counted",
           ("device_to", "memory_to_free", "force_patch_weights")),
    Symbol(_PATCHER, "ModelPatcher.unpatch_model", _P, "overridden: streaming ends before weights return",
           ("device_to", "unpatch_weights")),
    Symbol(_PATCHER, "ModelPatcher.detach", _P, "overridden: unloads a model, or passes it to another patcher",
           ("unpatch_all",)),
    Symbol(_PATCHER, "ModelPatcher.is_clone", _P, "overridden: tells which patcher takes a model over", ("other",)),
    Symbol("comfy.utils", "get_attr", _P, "finds what an object patch has put into a model", ("obj", "attr")),
    Symbol("comfy.utils", "set_attr", _P, "takes object patches out of a model while it is loaded",
           ("obj", "attr", "value")),
    Symbol(_PATCHER, "ModelPatcher.clone", _P, "a static copy of a dynamic model", keywords=("disable_dynamic",)),
    Symbol(_PATCHER, "ModelPatcher.model_patches_models", _P, "overridden: the first call of every load"),
    Symbol(_PATCHER, "ModelPatcher.model_size", _P, "overridden: what the plan needs on the compute device"),
    Symbol(_PATCHER, "ModelPatcher.loaded_size", _P, "how much of that is loaded"),
    Symbol(_PATCHER, "ModelPatcher._load_list", _P, "the blocks of a model, as the host counts them"),
    Symbol(_PATCHER, "ModelPatcher.patch_weight_to_device", _P, "applies LoRAs to a weight",
           ("key", "device_to", "inplace_update")),
    Symbol(_PATCHER, "ModelPatcher.unpin_weight", _P, "a weight is unpinned before it moves", ("key",)),
    Symbol(_PATCHER, "ModelPatcher.is_dynamic", _P, "a plan needs a static patcher"),
    Symbol(_PATCHER, "ModelPatcher.apply_hooks", _P, "called at the end of a load, as by the host", ("hooks",)),
    Symbol(_PATCHER, "ModelPatcher.add_callback_with_key", _P, "clones of placed patchers stay placed",
           ("call_type", "key", "callback")),
    Symbol(_PATCHER, "ModelPatcher.deepclone_multigpu", _D, "a model for another device gets weights of its own",
           ("new_load_device",)),
    Symbol(_PATCHER, "ModelPatcher.get_clone_model_override", _D, "the same, for a model that cannot be read again"),
    Symbol(_PATCHER, "ModelPatcher.set_model_compute_dtype", _D, "see unet_manual_cast", ("dtype",)),
    Symbol(_PATCHER, "CoreModelPatcher", _P, "swapped during one loader call, for loaders without disable_dynamic"),
    Symbol(_PATCHER, "move_weight_functions", _P, "patches of a block move with it", ("m", "device")),
    Symbol(_PATCHER, "wipe_lowvram_weight", _P, "marks of an earlier load are removed", ("m",)),
    Symbol("comfy.patcher_extension", "CallbacksMP.ON_LOAD", _P, "fired after a placed load, as after any other"),
    Symbol("comfy.patcher_extension", "CallbacksMP.ON_CLONE", _P, "see add_callback_with_key"),
    Symbol("comfy.utils", "ProgressBar", _P, "loading shows in the bar of the node that runs", ("total",)),
    Symbol("comfy.utils", "ProgressBar.update_absolute", _P, "see ProgressBar", ("value",)),
    Symbol("comfy.ops", "cast_bias_weight", _P, "moves weights to the device of the input", ("s", "input")),
    Symbol("comfy.ops", "CastWeightBiasOp.comfy_cast_weights", _P, "marks modules whose weights may rest elsewhere"),
    Symbol(_MEMORY, "module_size", _P, "a block's bytes, as the host counts them", ("module",)),
    Symbol(_MEMORY, "free_memory", _P, "unloads other models from a donor",
           ("memory_required", "device", "keep_loaded")),
    Symbol(_MEMORY, "minimum_inference_memory", _P, "stays free on a donor on which a model of this workflow computes"),
    Symbol(_MEMORY, "load_models_gpu", _D, "the way every model is loaded", ("models", "memory_required")),
    Symbol(_MEMORY, "get_torch_device", _D, "the compute device of a model that names none"),
    Symbol(_MEMORY, "get_all_torch_devices", _D, "the devices of this machine"),
    Symbol(_MEMORY, "get_free_memory", _D, "free bytes of a device", ("dev",)),
    Symbol(_MEMORY, "get_total_memory", _D, "bytes of a device", ("dev",)),
    Symbol(_MEMORY, "unet_manual_cast", _D, "the type to compute in on another device",
           ("weight_dtype", "inference_device")),
    Symbol(_MEMORY, "vae_dtype", _D, "the type of a VAE that was read again for another device",
           ("device", "allowed_dtypes")),
    Symbol(_MEMORY, "cuda_device_context", _D, "the host runs a model on its own device", ("device",)),
    Symbol("comfy.sd", "load_diffusion_model", _D, "loads on a device", ("unet_path", "model_options"),
           ("disable_dynamic",)),
    Symbol("comfy.sd", "load_clip", _D, "loads on a device", ("ckpt_paths",), ("model_options", "disable_dynamic")),
    Symbol("comfy.sd", "load_checkpoint_guess_config", _D, "loads on a device", ("ckpt_path",),
           ("model_options", "te_model_options", "disable_dynamic")),
    Symbol("comfy.sd", "VAE", _D, "loads on a device", ("sd", "device")),
    Symbol(_MEMORY, "unload_all_models", _L, "wrapped: pinned models stay, flagged ones leave"),
    Symbol(_MEMORY, "soft_empty_cache", _L, "wrapped: empties the caches of all devices", ("force",)),
    Symbol(_MEMORY, "current_loaded_models", _L, "which models are loaded; never assigned"),
    Symbol(_MEMORY, "LoadedModel", _L, "an entry of that list", ("model",)),
    Symbol(_MEMORY, "reset_cast_buffers", _L, "buffers of an ejected model"),
    Symbol("execution", "PromptExecutor.reset", _L, "drops the outputs that own the models; never called by us"),
    Symbol("execution", "PromptQueue.set_flag", _L, "asks for a free, as POST /free does", ("name", "data")),
    Symbol("execution", "PromptQueue.get_flags", _L, "what was asked for", ("reset",)),
    Symbol("execution", "PromptQueue.get_current_queue_volatile", _L, "the prompt that runs, and its nodes' inputs"),
    Symbol("server", "PromptServer", _L, "has the queue", ("loop",)),
    Symbol("server", "PromptServer.add_on_prompt_handler", _L, "sees the first prompt that has one of our nodes",
           ("handler",)),
    Symbol("comfy_api.latest", "Caching.CacheProvider", _L, "hands held models back to the next prompt"),
    Symbol("comfy_api.latest", "Caching.CacheValue", _L, "what it hands back", ("outputs", "ui")),
    Symbol("comfy_execution.cache_provider", "register_cache_provider", _L, "see CacheProvider", ("provider",)),
    Symbol("comfy_execution.cache_provider", "unregister_cache_provider", _L, "see CacheProvider", ("provider",)),
    Symbol("comfy_execution.utils", "get_executing_context", _L, "which node says keep or eject"),
    Symbol("comfy_execution.progress", "get_progress_state", _L, "the graph of the prompt that runs"),
    Symbol("comfy.cli_args", "args", _L, "whether the executor's own cache watches the RAM"),
    Symbol("comfy.memory_management", "extra_ram_release", _L, "Free Memory: drops cached outputs during a prompt",
           ("target", "free_active")),
    Symbol("comfy.memory_management", "extra_ram_release_callback", _L, "whether the host's cache can do that"),
    Symbol(_MEMORY, "cpu_mode", _L, "whether the host uses the CPU only"),
    Symbol("folder_paths", "folder_names_and_paths", _L, "the files a loader's inputs name"),
    Symbol("folder_paths", "get_full_path", _L, "the file behind a name", ("folder_name", "filename")),
)  # fmt: skip
