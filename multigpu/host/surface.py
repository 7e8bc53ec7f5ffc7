"""Every symbol of the host that this project uses, what is expected of it, and what it is used for.

`stubs/` has the types of the same symbols, so that the type checker refuses a use that is not listed there; a test
checks that stubs and rows agree, and that no row is left that nothing uses. When a host version changes a symbol, the
feature that needs it is turned off, with a log line that names it. `multigpu doctor --all` prints the whole table.
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
    COMMAND = "multigpu doctor"
    PACKS = "nodes for other packs"
    SPEEDS = "keeping measured speeds"
    HOISTING = "computing layers ahead"
    PANEL = "the panel"
    REMOTE = "devices of other machines"


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol: `path` inside `module`, the feature that needs it, and the reason.

    `positional` are the parameters a callable must begin with, in order, `self` left out. `keywords` are parameters it
    must have anywhere. A path may end with an attribute that objects of a class have, or that a function assigns.
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
_API = "comfy_api.latest"
_N, _P, _D, _L, _C = Feature.NODES, Feature.PLACEMENT, Feature.DEVICES, Feature.LIFECYCLE, Feature.COMMAND
_O, _H, _R = Feature.PACKS, Feature.HOISTING, Feature.REMOTE


def _members(module: str, owner: str, feature: Feature, why: str, *names: str) -> tuple[Symbol, ...]:
    """Rows for attributes of one class that are used for one reason."""
    return tuple(Symbol(module, f"{owner}.{name}", feature, why) for name in names)


SURFACE: tuple[Symbol, ...] = (
    # Nodes: what they are made of, and the loaders that they call.
    Symbol(_API, "ComfyExtension", _N, "what the entry point returns"),
    Symbol(_API, "ComfyExtension.get_node_list", _N, "overridden: our nodes"),
    Symbol(_API, "io.ComfyNode", _N, "base of our nodes"),
    Symbol(_API, "io.ComfyNode.define_schema", _N, "overridden; and called for the inputs of a loader"),
    Symbol(_API, "io.ComfyNode.PREPARE_CLASS_CLONE", _N, "before calling a loader of the host", ("v3_data",)),
    Symbol(_API, "io.ComfyNode.EXECUTE_NORMALIZED", _N, "calls a loader of the host"),
    Symbol(_API, "io.Schema", _N, "inputs and outputs of our nodes",
           keywords=("node_id", "display_name", "category", "description", "search_aliases", "inputs", "outputs",
                     "is_output_node", "is_deprecated")),
    Symbol(_API, "io.Schema.inputs", _N, "the inputs of a loader of the host"),
    Symbol(_API, "io.NodeOutput", _N, "what our nodes return", keywords=("ui",)),
    Symbol(_API, "io.NodeOutput.result", _N, "what a loader of the host returns"),
    *(Symbol(_API, f"io.{kind}.Input", _N, "an input of our nodes", ("id",), keywords) for kind, keywords in (
        ("AnyType", ("optional", "tooltip")), ("Boolean", ("default", "optional", "tooltip")),
        ("Combo", ("options", "default", "optional", "tooltip", "extra_dict")),
        ("Float", ("default", "min", "max", "step", "optional", "tooltip")),
        ("String", ("default", "optional", "tooltip")), ("Int", ("default", "min", "max", "tooltip")),
        ("Model", ()), ("Clip", ()), ("Vae", ()), ("ControlNet", ()), ("ClipVision", ()))),
    *(Symbol(_API, f"io.{kind}.Output", _N, "an output of our nodes", keywords=keywords) for kind, keywords in (
        ("AnyType", ("display_name",)), ("String", ("display_name",)),
        ("Model", ()), ("Clip", ()), ("Vae", ()), ("ControlNet", ()), ("ClipVision", ()))),
    Symbol(_API, "io.Custom", _N, "inputs and outputs of a loader of the host, as ours", ("io_type",)),
    Symbol(_API, "ui.PreviewText", _N, "the text of Memory Report among a prompt's outputs", ("value",)),
    Symbol("nodes", "NODE_DISPLAY_NAME_MAPPINGS", _O, "the titles of nodes of other packs"),
    Symbol("nodes", "NODE_CLASS_MAPPINGS", _N, "loaders of the host and of other packs, looked up when a node runs"),
    *_members("nodes", "UNETLoader", _N, "how loaders of the host tell their inputs and outputs, and are called",
              "INPUT_TYPES", "RETURN_TYPES", "FUNCTION"),
    Symbol("folder_paths", "get_full_path_or_raise", _N, "the file behind a name", ("folder_name", "filename")),
    Symbol("folder_paths", "get_folder_paths", _N, "where embeddings are, for a checkpoint", ("folder_name",)),
    Symbol("folder_paths", "folder_names_and_paths", _N, "the files a loader's inputs name"),
    Symbol("folder_paths", "get_full_path", _N, "the file behind a name", ("folder_name", "filename")),
    Symbol("comfy.utils", "ProgressBar", _N, "loading shows in the bar of the node that runs", ("total",)),
    Symbol("comfy.utils", "ProgressBar.update_absolute", _N, "see ProgressBar", ("value",)),
    # The engine is a mixin over the static patcher: what it overrides, what it calls through to.
    Symbol(_PATCHER, "ModelPatcher", _P, "base of the placed patcher"),
    Symbol(_PATCHER, "ModelPatcher.load", _P, "overridden: places blocks by the plan",
           ("device_to", "lowvram_model_memory", "force_patch_weights", "full_load")),
    Symbol(_PATCHER, "ModelPatcher.partially_load", _P, "overridden: a plan is applied whole",
           ("device_to", "extra_memory", "force_patch_weights")),
    Symbol(_PATCHER, "ModelPatcher.partially_unload", _P, "overridden: what leaves the compute device is counted",
           ("device_to", "memory_to_free", "force_patch_weights")),
    Symbol(_PATCHER, "ModelPatcher.unpatch_model", _P, "overridden: streaming ends before weights return",
           ("device_to", "unpatch_weights")),
    Symbol(_PATCHER, "ModelPatcher.detach", _P, "overridden: unloads a model, or passes it on", ("unpatch_all",)),
    Symbol(_PATCHER, "ModelPatcher.is_clone", _P, "overridden: tells which patcher takes a model over", ("other",)),
    Symbol(_PATCHER, "ModelPatcher.__del__", _P, "overridden: a patcher that is gone unloads nothing"),
    Symbol(_PATCHER, "ModelPatcher.model_patches_models", _P, "overridden: the first call of every load"),
    Symbol(_PATCHER, "ModelPatcher.model_size", _P, "overridden: what the plan needs on the compute device"),
    Symbol(_PATCHER, "ModelPatcher.patch_hooks", _P, "overridden: hooks change weights between steps", ("hooks",)),
    Symbol(_PATCHER, "ModelPatcher.unpatch_hooks", _P, "see patch_hooks", ("whitelist_keys_set",)),
    Symbol(_PATCHER, "ModelPatcher.patch_model", _P, "applies object patches", keywords=("load_weights",)),
    Symbol(_PATCHER, "ModelPatcher.use_ejected", _P, "takes injections out while a model is loaded",
           ("skip_and_inject_on_exit_only",)),
    Symbol(_PATCHER, "ModelPatcher.clone", _P, "a placed patcher is a clone",
           keywords=("disable_dynamic", "model_override")),
    Symbol(_PATCHER, "ModelPatcher.loaded_size", _P, "how much of a model is loaded"),
    Symbol(_PATCHER, "ModelPatcher._load_list", _P, "the blocks of a model, as the host counts them"),
    Symbol(_PATCHER, "ModelPatcher.patch_weight_to_device", _P, "applies LoRAs to a weight", ("key", "device_to"),
           ("return_weight",)),
    Symbol(_PATCHER, "ModelPatcher.model_state_dict_for_saving", _P, "saves weights, with patches in them"),
    Symbol("comfy.lora", "calculate_shape", _P, "a weight whose shape patches change gets them when it is loaded",
           ("patches", "weight", "key")),
    Symbol(_PATCHER, "ModelPatcher.is_dynamic", _P, "a plan needs a static patcher"),
    Symbol(_PATCHER, "ModelPatcher.apply_hooks", _P, "called at the end of a load, as by the host", ("hooks",),
           ("force_apply",)),
    Symbol(_PATCHER, "ModelPatcher.add_callback_with_key", _P, "clones of placed patchers stay placed",
           ("call_type", "key", "callback")),
    Symbol(_PATCHER, "ModelPatcher.remove_callbacks_with_key", _P, "see add_callback_with_key", ("call_type", "key")),
    Symbol(_PATCHER, "ModelPatcher.get_all_callbacks", _P, "see CallbacksMP.ON_LOAD", ("call_type",)),
    *_members(_PATCHER, "ModelPatcher", _P, "an attribute of every patcher",
              "model", "load_device", "offload_device", "size", "patches", "patches_uuid", "backup",
              "object_patches_backup", "weight_wrapper_patches", "force_cast_weights", "attachments", "callbacks",
              "hook_backup", "hook_patches", "injections", "forced_hooks", "cached_patcher_init"),
    *_members(_PATCHER, "ModelPatcher", _P, "set on the model: what is loaded",
              "model.device", "model.current_weight_patches_uuid", "model.lowvram_patch_counter",
              "model.model_loaded_weight_memory", "model.model_lowvram", "model.model_offload_buffer_memory"),
    Symbol(_PATCHER, "CoreModelPatcher", _P, "replaced during one loader call, for loaders without disable_dynamic"),
    Symbol(_PATCHER, "move_weight_functions", _P, "patches of a block move with it", ("m", "device")),
    Symbol(_PATCHER, "wipe_lowvram_weight", _P, "marks of an earlier load are removed", ("m",)),
    Symbol("comfy.patcher_extension", "CallbacksMP.ON_LOAD", _P, "fired after a placed load, as after any other"),
    Symbol("comfy.patcher_extension", "CallbacksMP.ON_CLONE", _P, "see add_callback_with_key"),
    *_members("comfy.ops", "CastWeightBiasOp", _P, "modules whose weights may rest elsewhere",
              "comfy_cast_weights", "weight_function", "bias_function"),
    Symbol("comfy.ops", "disable_weight_init.Linear.weight_comfy_model_dtype", _P, "the data type that was asked for"),
    *_members(_PATCHER, "ModelPatcher.load", _P, "what the host's loading sets on modules",
              "comfy_patched_weights", "prev_comfy_cast_weights", "comfy_force_cast_weights"),
    Symbol("comfy.utils", "get_attr", _P, "finds what an object patch has put into a model", ("obj", "attr")),
    Symbol("comfy.utils", "set_attr", _P, "takes object patches out of a model while it is loaded",
           ("obj", "attr", "value")),
    Symbol(_MEMORY, "free_memory", _P, "unloads other models from a donor",
           ("memory_required", "device", "keep_loaded")),
    Symbol(_MEMORY, "minimum_inference_memory", _P, "stays free on a donor on which a model of this workflow computes"),
    Symbol(_MEMORY, "extra_reserved_memory", _P, "stays free when streamed weights fill the compute device"),
    Symbol(_MEMORY, "get_free_memory", _P, "free bytes of a device", ("dev",)),
    Symbol(_MEMORY, "get_total_memory", _P, "bytes of a device", ("dev",)),
    Symbol(_MEMORY, "current_loaded_models", _P, "which models are loaded; never assigned"),
    Symbol(_MEMORY, "LoadedModel", _P, "an entry of that list", ("model",)),
    *_members(_MEMORY, "LoadedModel", _P, "an attribute of every entry",
              "model", "device", "currently_used", "real_model", "model_finalizer"),
    Symbol("comfy.model_base", "BaseModel.load_model_weights", _P, "replaced while a placed model is read",
           ("sd", "unet_prefix", "assign")),
    # Layers that are computed ahead.
    Symbol(_PATCHER, "ModelPatcher.add_wrapper_with_key", _H, "our wrapper is on every placed patcher",
           ("wrapper_type", "key", "wrapper")),
    Symbol(_PATCHER, "ModelPatcher.remove_wrappers_with_key", _H, "see add_wrapper_with_key", ("wrapper_type", "key")),
    Symbol(_PATCHER, "ModelPatcher.wrappers", _P, "says whether the model is compiled"),
    Symbol("comfy.patcher_extension", "WrappersMP.APPLY_MODEL", _P, "sees each pass of a sampling run"),
    *_members("comfy.patcher_extension", "WrapperExecutor", _H, "the model that is called, and what calls it",
              "class_obj", "original", "__call__"),
    # Components: what marks them, where each keeps its patcher, and what else has to change with it.
    *_members("comfy.sd", "CLIP", _P, "a text encoder around another patcher", "patcher", "cond_stage_model"),
    *_members("comfy.sd", "VAE", _P, "a VAE around another patcher",
              "patcher", "first_stage_model", "device", "vae_dtype", "working_dtypes"),
    *_members("comfy.controlnet", "ControlNet", _P, "a ControlNet around another patcher",
              "control_model_wrapped", "load_device", "get_control"),
    *_members("comfy.clip_vision", "ClipVisionModel", _P, "a CLIP vision model around another patcher",
              "model", "patcher", "load_device", "encode_image"),
    # Choosing a device.
    Symbol(_PATCHER, "ModelPatcher.deepclone_multigpu", _D, "a model for another device gets weights of its own",
           ("new_load_device",)),
    Symbol(_PATCHER, "ModelPatcher.get_clone_model_override", _D, "the same, for a model that cannot be read again"),
    Symbol(_PATCHER, "ModelPatcher.set_model_compute_dtype", _D, "see unet_manual_cast", ("dtype",)),
    Symbol(_PATCHER, "ModelPatcherDynamic.register_load_device", _D, "gives it another device", ("device",)),
    Symbol("comfy.model_base", "BaseModel.get_dtype", _D, "see unet_manual_cast"),
    Symbol("comfy.model_base", "BaseModel.manual_cast_dtype", _D, "see unet_manual_cast"),
    Symbol("comfy.model_base", "BaseModel.model_config", _D, "shared by copies of a model"),
    Symbol(_MEMORY, "get_torch_device", _D, "the compute device of a model that names none"),
    Symbol(_MEMORY, "unet_manual_cast", _D, "the type to compute in on another device",
           ("weight_dtype", "inference_device")),
    Symbol(_MEMORY, "vae_dtype", _D, "the type of a VAE that was read again for another device",
           ("device", "allowed_dtypes")),
    Symbol("comfy.sd", "load_checkpoint_guess_config", _D, "loads one part of a checkpoint on a device", ("ckpt_path",),
           ("output_vae", "output_clip", "embedding_directory", "output_model")),
    # Keep and eject.
    Symbol(_MEMORY, "unload_all_models", _L, "replaced: pinned models stay, flagged ones leave"),
    Symbol(_MEMORY, "soft_empty_cache", _L, "replaced: it is the end of a free", ("force",)),
    Symbol(_MEMORY, "reset_cast_buffers", _L, "buffers of an ejected model"),
    Symbol(_MEMORY, "is_oom", _L, "after an out-of-memory error nothing is kept", ("e",)),
    Symbol(_MEMORY, "cpu_mode", _L, "whether the host uses the CPU only"),
    Symbol(_PATCHER, "ModelPatcher.parent", _L, "whether a patcher came from a loader"),
    Symbol("execution", "PromptQueue.set_flag", _L, "asks for a free, as POST /free does", ("name", "data")),
    Symbol("execution", "PromptQueue.currently_running", _L, "whether a prompt runs"),
    Symbol("execution", "PromptQueue.get_current_queue_volatile", _L, "the prompt that runs, and its nodes' inputs"),
    Symbol(_MEMORY, "unet_offload_device", _O, "replaced while a node runs that has an offload device"),
    Symbol(_API, "io.ComfyNode.RELATIVE_PYTHON_MODULE", _O, "the pack that a node belongs to"),
    Symbol("server", "PromptServer.app", _O, "its start-up comes after the last pack is loaded"),
    Symbol("server", "PromptServer", _L, "has the queue"),
    Symbol("server", "PromptServer.instance", _L, "the server of this process"),
    Symbol("server", "PromptServer.prompt_queue", _L, "see PromptQueue"),
    Symbol("server", "PromptServer.add_on_prompt_handler", _L, "sees the first prompt with our nodes", ("handler",)),
    Symbol(_API, "Caching.CacheProvider", _L, "hands held models back to the next prompt"),
    Symbol(_API, "Caching.CacheProvider.should_cache", _L, "overridden: sees outputs", ("context", "value")),
    Symbol(_API, "Caching.CacheProvider.on_lookup", _L, "overridden: hands outputs back", ("context",)),
    Symbol(_API, "Caching.CacheProvider.on_store", _L, "overridden", ("context", "value")),
    Symbol(_API, "Caching.CacheProvider.on_prompt_start", _L, "overridden", ("prompt_id",)),
    Symbol(_API, "Caching.CacheProvider.on_prompt_end", _L, "overridden", ("prompt_id",)),
    *_members(_API, "Caching.CacheContext", _L, "which node is asked about", "node_id", "cache_key_hash"),
    Symbol(_API, "Caching.CacheValue", _L, "what is handed back", ("outputs",)),
    *_members(_API, "Caching.CacheValue", _L, "the outputs of a node", "outputs", "ui"),
    Symbol("comfy_execution.cache_provider", "register_cache_provider", _L, "see CacheProvider", ("provider",)),
    Symbol("comfy_execution.cache_provider", "unregister_cache_provider", _L, "see CacheProvider", ("provider",)),
    Symbol("comfy_execution.utils", "get_executing_context", _L, "which node says keep or eject"),
    Symbol("comfy_execution.utils", "ExecutionContext.node_id", _L, "see get_executing_context"),
    Symbol("comfy_execution.progress", "get_progress_state", _L, "the graph of the prompt that runs"),
    *_members("comfy_execution.progress", "ProgressRegistry", _L, "see get_progress_state", "prompt_id", "dynprompt"),
    *_members("comfy_execution.graph", "DynamicPrompt", _L, "see get_progress_state",
              "original_prompt", "ephemeral_prompt", "ephemeral_parents"),
    *_members("comfy.cli_args", "args", _L, "whether the executor's own cache watches the RAM",
              "cache_classic", "cache_none", "cache_lru"),
    Symbol("comfy.memory_management", "extra_ram_release", _L, "Free Memory: drops cached outputs during a prompt",
           ("target", "free_active")),
    Symbol("comfy.memory_management", "extra_ram_release_callback", _L, "whether the host's cache can do that"),
    Symbol("folder_paths", "get_system_user_directory", Feature.SPEEDS, "where measured speeds are kept", ("name",)),
    # The panel.
    Symbol("server", "PromptServer.routes", Feature.PANEL, "gets the routes under /multigpu/"),
    Symbol("folder_paths", "get_user_directory", Feature.PANEL, "where the host saves its settings dialog"),
    Symbol("server", "PromptServer.sockets", Feature.PANEL, "the clients that snapshots are sent to"),
    *_members("comfy.cli_args", "args", Feature.PANEL, "the other origin that may ask", "enable_cors_header"),
    # Components on other machines: real objects of the host without weights, and what a worker does with real ones.
    Symbol(_PATCHER, "ModelPatcher.add_patches", _R, "overridden: there are no weights here", ("patches",)),
    Symbol(_PATCHER, "ModelPatcher.add_hook_patches", _R, "see add_patches", ("hook", "patches")),
    Symbol(_PATCHER, "ModelPatcher.get_key_patches", _R, "see add_patches"),
    Symbol(_PATCHER, "ModelPatcher.add_object_patch", _R, "overridden: what it may replace", ("name", "obj")),
    Symbol(_PATCHER, "ModelPatcher.get_free_memory", _R, "overridden: that of the other machine", ("device",)),
    *_members(_PATCHER, "ModelPatcher", _R, "what nodes on a worker have set", "model_options", "is_clip"),
    Symbol("comfy.model_base", "BaseModel.current_patcher", _R, "asked by the host's samplers"),
    Symbol("comfy.model_base", "BaseModel.extra_conds", _R, "overridden: conditions may need weights"),
    Symbol("comfy.model_base", "ModelType", _R, "the kind of a model, by name"),
    Symbol("comfy.conds", "CONDRegular", _R, "what a model makes of conditions", ("cond",)),
    Symbol("comfy.patcher_extension", "WrappersMP.CALC_COND_BATCH", _R, "two halves of a step on two machines"),
    Symbol("comfy.patcher_extension", "merge_nested_dicts", _R, "options from here with those of a worker's model",
           ("dict1", "dict2")),
    Symbol(_MEMORY, "load_models_gpu", _R, "loads a worker's model", ("models",), ("memory_required",)),
    Symbol(_MEMORY, "intermediate_device", _R, "where nodes expect results"),
    Symbol(_MEMORY, "interrupt_current_processing", _R, "an interruption reaches the worker", ("value",)),
    Symbol(_MEMORY, "InterruptProcessingException", _R, "an interruption on a worker is told in words"),
    Symbol(_MEMORY, "throw_exception_if_processing_interrupted", _R, "ends a call that waits"),
    Symbol("comfy.sd", "CLIP", _R, "a text encoder without weights", keywords=("no_init",)),
    *_members("comfy.sd", "VAE", _R, "overridden: asked of the other machine", "encode", "encode_tiled", "decode",
              "decode_tiled", "spacial_compression_decode", "spacial_compression_encode",
              "temporal_compression_decode", "get_sd"),
    Symbol("execution", "validate_prompt", _R, "what is wrong with a subgraph",
           ("prompt_id", "prompt", "partial_execution_list")),
    Symbol("execution", "PromptQueue.put", _R, "runs a subgraph on a worker", ("item",)),
    Symbol("execution", "PromptQueue.get_history", _R, "whether it has run", ("prompt_id",)),
    Symbol("execution", "PromptQueue.delete_history_item", _R, "see get_history", ("id_to_delete",)),
    # The command line.
    Symbol("comfy.options", "enable_args_parsing", _C, "imports the host on a machine without GPU"),
)  # fmt: skip
