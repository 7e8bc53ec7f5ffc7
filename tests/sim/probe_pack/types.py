"""Number types on the CPU as on a GPU with fp16 and bf16."""

import comfy.model_management as model_management


def _yes(*_args: object, **_kwargs: object) -> bool:
    return True


def choose_types_as_on_a_gpu() -> None:
    model_management.should_use_fp16 = _yes
    model_management.should_use_bf16 = _yes
