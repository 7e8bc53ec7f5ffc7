"""A pack with one node: the two halves of classifier-free guidance, each computed as a batch of its own, here."""

from __future__ import annotations

from typing import Any

KEY = "one by one"


def one_by_one(executor: Any, model: Any, conds: list[Any], *more: Any) -> list[Any]:
    """A wrapper of a step."""
    return [executor(model, [conds[0], None], *more)[0], executor(model, [None, conds[1]], *more)[1]]


class OneByOne:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "wrapped"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def wrapped(self, model: Any) -> tuple[Any]:
        from comfy.patcher_extension import WrappersMP

        new = model.clone()
        new.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one)
        return (new,)


NODE_CLASS_MAPPINGS = {"TestOneByOne": OneByOne}
