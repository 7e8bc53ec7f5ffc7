"""Write the tiny models: `python -m devtools.toy COMFYUI_TREE MODELS_FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from . import by_hand, from_host
from .by_hand import State


def main(tree: Path, folder: Path) -> None:
    flux = by_hand.flux()
    clip = by_hand.clip_l()
    _save(flux, folder / "diffusion_models" / "toy_flux.safetensors")
    _save(by_hand.flux_lora(flux), folder / "loras" / "toy_flux_lora.safetensors")
    _save(clip, folder / "text_encoders" / "toy_clip_l.safetensors")
    _save(by_hand.taesd(16, scale=0.3611, shift=0.1159), folder / "vae" / "toy_taef1.safetensors")

    from_host.use(tree)
    _save(_checkpoint_sd15(clip), folder / "checkpoints" / "toy_sd15.safetensors")
    _save(from_host.controlnet_sd15(), folder / "controlnet" / "toy_sd15_controlnet.safetensors")
    _save(from_host.wan(), folder / "diffusion_models" / "toy_wan.safetensors")
    _save(from_host.wan_vae(), folder / "vae" / "toy_wan_vae.safetensors")


def _checkpoint_sd15(clip: State) -> State:
    parts = {
        "model.diffusion_model.": from_host.unet_sd15(),
        "cond_stage_model.transformer.": {k: v for k, v in clip.items() if k.startswith("text_model")},
        "first_stage_model.": by_hand.taesd(4, scale=0.18215, shift=0.0),
    }
    return {prefix + name: tensor for prefix, state in parts.items() for name, tensor in state.items()}


def _save(state: State, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt"})
    sys.stdout.write(f"{path.relative_to(path.parent.parent)} ({path.stat().st_size / 1e6:.0f} MB)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
