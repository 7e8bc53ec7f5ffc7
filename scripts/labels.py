"""Labels of our nodes in several languages, in the form that ComfyUI's frontend reads from `locales/`."""

from __future__ import annotations

from typing import Any

LANGUAGES = ("en", "zh", "de")

WIDGETS = {
    "en": {
        "compute_device": "compute device", "device": "device", "mode": "mode", "virtual_vram_gb": "virtual VRAM (GB)",
        "donor_device": "donor", "expert_mode_allocations": "allocation", "eject_models": "eject other models",
        "keep_loaded": "keep loaded", "high_precision_loras": "high precision LoRA", "free": "free", "value": "value",
        "model": "model", "clip": "clip", "vae": "vae", "control_net": "control net", "clip_vision": "clip vision",
    },
    "zh": {
        "compute_device": "计算设备", "device": "设备", "mode": "模式", "virtual_vram_gb": "虚拟显存 (GB)",
        "donor_device": "供体设备", "expert_mode_allocations": "分配方案", "eject_models": "卸载其他模型",
        "keep_loaded": "保持加载", "high_precision_loras": "高精度 LoRA", "free": "释放", "value": "值",
        "model": "模型", "clip": "文本编码器", "vae": "VAE", "control_net": "ControlNet", "clip_vision": "CLIP 视觉",
    },
    "de": {
        "compute_device": "Rechengerät", "device": "Gerät", "mode": "Modus", "virtual_vram_gb": "virtueller VRAM (GB)",
        "donor_device": "Spender", "expert_mode_allocations": "Aufteilung", "eject_models": "andere Modelle entladen",
        "keep_loaded": "geladen halten", "high_precision_loras": "LoRA in hoher Genauigkeit", "free": "freigeben",
        "value": "Wert", "model": "Modell", "clip": "Textencoder", "vae": "VAE", "control_net": "ControlNet",
        "clip_vision": "CLIP Vision",
    },
}  # fmt: skip
"""Widget or input -> label. Prefixed ones (`unet_`, `clip_`, `vae_`) are put together from these."""

PREFIXES = {
    "en": {"unet_": "model: ", "clip_": "clip: ", "vae_": "vae: "},
    "zh": {"unet_": "模型：", "clip_": "文本编码器：", "vae_": "VAE："},
    "de": {"unet_": "Modell: ", "clip_": "Textencoder: ", "vae_": "VAE: "},
}

TITLES = {
    "zh": {
        "MultiGPUPlaceModel": "放置模型", "MultiGPUPlaceCLIP": "放置 CLIP", "MultiGPUPlaceVAE": "放置 VAE",
        "MultiGPUPlaceControlNet": "放置 ControlNet", "MultiGPUPlaceCLIPVision": "放置 CLIP 视觉",
        "MultiGPUFreeMemory": "释放内存", "MultiGPUMemoryReport": "内存报告",
        "DeviceSelectorMultiGPU": "设备选择 (MultiGPU)",
        "UNETLoaderMultiGPU": "加载扩散模型 (MultiGPU)", "UNETLoaderDisTorch2MultiGPU": "加载扩散模型 (DisTorch2)",
        "CheckpointLoaderSimpleMultiGPU": "加载 Checkpoint (MultiGPU)",
        "CheckpointLoaderSimpleDisTorch2MultiGPU": "加载 Checkpoint (DisTorch2)",
        "VAELoaderMultiGPU": "加载 VAE (MultiGPU)", "VAELoaderDisTorch2MultiGPU": "加载 VAE (DisTorch2)",
        "CLIPLoaderMultiGPU": "加载 CLIP (MultiGPU)", "CLIPLoaderDisTorch2MultiGPU": "加载 CLIP (DisTorch2)",
    },
    "de": {
        "MultiGPUPlaceModel": "Modell platzieren", "MultiGPUPlaceCLIP": "CLIP platzieren",
        "MultiGPUPlaceVAE": "VAE platzieren", "MultiGPUPlaceControlNet": "ControlNet platzieren",
        "MultiGPUPlaceCLIPVision": "CLIP Vision platzieren", "MultiGPUFreeMemory": "Speicher freigeben",
        "MultiGPUMemoryReport": "Speicherbericht",
        "DeviceSelectorMultiGPU": "Gerät wählen (MultiGPU)",
        "UNETLoaderMultiGPU": "Diffusionsmodell laden (MultiGPU)",
        "UNETLoaderDisTorch2MultiGPU": "Diffusionsmodell laden (DisTorch2)",
        "CheckpointLoaderSimpleMultiGPU": "Checkpoint laden (MultiGPU)",
        "CheckpointLoaderSimpleDisTorch2MultiGPU": "Checkpoint laden (DisTorch2)",
        "VAELoaderMultiGPU": "VAE laden (MultiGPU)", "VAELoaderDisTorch2MultiGPU": "VAE laden (DisTorch2)",
        "CLIPLoaderMultiGPU": "CLIP laden (MultiGPU)", "CLIPLoaderDisTorch2MultiGPU": "CLIP laden (DisTorch2)",
    },
}  # fmt: skip
"""Titles; a node that has none keeps its English one."""

TIPS = {
    "zh": {
        "compute_device": "在哪里计算。default 为 ComfyUI 自己选择的设备。",
        "mode": "auto：按空闲内存自动决定；virtual VRAM：固定数量的权重离开计算设备；"
        "expert：由你指定每个设备存放多少。",
        "virtual_vram_gb": "离开计算设备的权重大小 (GB)。0 表示全部留下。",
        "donor_device": "存放这些权重的设备，例如 cpu 或 cuda:1,cpu。",
        "expert_mode_allocations": "每个设备的份额，例如 cuda:0,2.5gb;cpu,* 或 cuda:0,25%;cpu,75%。",
        "keep_loaded": "keep：释放内存时保留；eject：下次释放时离开；default：由 ComfyUI 决定。",
    },
    "de": {
        "compute_device": "Wo gerechnet wird. default ist das Gerät, das ComfyUI wählen würde.",
        "mode": "auto: nach freiem Speicher; virtual VRAM: eine feste Menge verlässt das Rechengerät; "
        "expert: du sagst, wie viel wo liegt.",
        "virtual_vram_gb": "Gigabyte an Gewichten, die das Rechengerät verlassen. 0: nichts.",
        "donor_device": "Die Geräte, die sie aufnehmen, der Reihe nach: cpu oder cuda:1,cpu.",
        "expert_mode_allocations": "Mengen je Gerät: cuda:0,2.5gb;cpu,* oder cuda:0,25%;cpu,75%.",
        "keep_loaded": "keep: bleibt, wenn Speicher freigegeben wird. eject: geht beim nächsten Mal. "
        "default: ComfyUI entscheidet.",
    },
}


def labels(language: str, nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of `nodeDefs.json` in one language."""
    return {node_id: _node(language, node_id, info) for node_id, info in sorted(nodes.items())}


def _node(language: str, node_id: str, info: dict[str, Any]) -> dict[str, Any]:
    inputs = {}
    for name in (name for section in info["input_order"].values() for name in section):
        label = _label(language, name)
        if label is not None:
            tip = TIPS.get(language, {}).get(name)
            inputs[name] = {"name": label} | ({"tooltip": tip} if tip and node_id.startswith("MultiGPUPlace") else {})
    title = TITLES.get(language, {}).get(node_id, info["display_name"])
    return {"display_name": title, "inputs": inputs}


def _label(language: str, name: str) -> str | None:
    known = WIDGETS[language]
    if name in known:
        return known[name]
    for prefix, before in PREFIXES[language].items():
        if name.startswith(prefix) and name.removeprefix(prefix) in known:
            return before + known[name.removeprefix(prefix)]
    return None
