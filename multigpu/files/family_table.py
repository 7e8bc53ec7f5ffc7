"""The model families whose order of execution is known: how to recognise each, and the order of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

Key = tuple[tuple[int, int, str], ...]
_MOST_WORDS = 24


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    `signs` are patterns that each have to match some module's name from its start or from a dot in it. `order` lists
    parts of module names, each one or two words joined by a dot, in order of execution; parts at the same level are
    compared by their place in it.
    `tokens` and `text_tokens` are typical counts at a usual size, for the compute estimates.
    """

    name: str
    signs: tuple[str, ...]
    order: tuple[str, ...]
    tokens: int = 4096
    text_tokens: int = 512
    text: bool = False
    ranks: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", {part: rank for rank, part in enumerate(self.order)})

    def matches(self, modules: Iterable[str]) -> bool:
        """Whether every sign is found among the module names."""
        names = list(modules)
        return bool(self.signs) and all(any(map(re.compile(rf"(?:^|\.){sign}").search, names)) for sign in self.signs)

    def key(self, module: str) -> Key:
        """Sorts module names in order of execution; words that are not in `order` come last, by name.

        Of a name with more words than any module has, the last ones count as one.
        """
        words = module.split(".", _MOST_WORDS)
        key: list[tuple[int, int, str]] = []
        at = 0
        while at < len(words):
            if words[at].isdecimal():
                key.append((0, int(words[at][:15]), ""))
                at += 1
                continue
            pair = ".".join(words[at : at + 2])
            part = pair if pair in self.ranks else words[at]
            key.append((1, self.ranks.get(part, len(self.ranks)), part))
            at += 2 if part == pair and at + 1 < len(words) else 1
        return tuple(key)


def _order(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FLUX = _order(
    """img_in time_in guidance_in vector_in txt_in double_stream_modulation_img double_stream_modulation_txt
    single_stream_modulation double_blocks single_blocks final_layer in_layer out_layer img_mod txt_mod modulation
    img_norm1 img_attn.qkv img_attn_qkv img_attn.norm img_attn_q_norm img_attn_k_norm txt_norm1 txt_attn.qkv
    txt_attn_qkv txt_attn.norm txt_attn_q_norm txt_attn_k_norm img_attn.proj img_attn_proj img_norm2 img_mlp
    txt_attn.proj txt_attn_proj txt_norm2 txt_mlp pre_norm linear1 norm linear2 adaLN_modulation linear"""
)
_UNET = _order(
    """time_embed label_emb input_blocks middle_block output_blocks out op in_layers emb_layers out_layers
    skip_connection norm proj_in transformer_blocks proj_out norm1 attn1 norm2 attn2 norm3 ff to_q to_k to_v to_out
    net conv"""
)
_SD3 = _order(
    """x_embedder pos_embed t_embedder y_embedder context_embedder joint_blocks final_layer
    context_block.adaLN_modulation context_block.norm1 context_block.attn x_block.adaLN_modulation x_block.norm1
    x_block.attn context_block.norm2 context_block.mlp x_block.attn2 x_block.norm2 x_block.mlp qkv ln_q ln_k proj fc1
    fc2 adaLN_modulation linear"""
)
_WAN = _order(
    """patch_embedding text_embedding time_embedding time_projection img_emb blocks head modulation norm1 self_attn
    norm3 cross_attn norm2 ffn q k v norm_q norm_k k_img v_img norm_k_img o"""
)
_QWEN = _order(
    """img_in txt_norm txt_in time_text_embed transformer_blocks norm_out proj_out img_mod txt_mod img_norm1 txt_norm1
    attn img_norm2 img_mlp txt_norm2 txt_mlp to_q to_k to_v norm_q norm_k add_q_proj add_k_proj add_v_proj norm_added_q
    norm_added_k to_out to_add_out"""
)
_LTX = _order(
    """patchify_proj adaln_single caption_projection transformer_blocks proj_out scale_shift_table attn1 attn2 ff to_q
    to_k to_v q_norm k_norm to_out net"""
)
_T5 = _order(
    """shared token_embd encoder.embed_tokens encoder.block encoder.final_layer_norm enc.blk enc.output_norm
    attn_norm layer layer_norm SelfAttention attn_q attn_k attn_v attn_rel_b attn_o q k v relative_attention_bias o
    DenseReluDense ffn_norm ffn_gate ffn_up ffn_down wi wi_0 wi_1 wo"""
)
_CLIP = _order(
    """text_model.embeddings text_model.encoder text_model.final_layer_norm text_projection token_embedding
    positional_embedding transformer layers resblocks ln_final layer_norm1 ln_1 self_attn attn q_proj k_proj v_proj
    out_proj layer_norm2 ln_2 mlp fc1 c_fc fc2 c_proj"""
)
_LLAMA = _order(
    """token_embd model.embed_tokens embed_tokens model.layers layers blk model.norm norm output_norm lm_head output
    input_layernorm attn_norm self_attn attn_q attn_k attn_v q_proj k_proj v_proj q_norm k_norm o_proj attn_output
    post_attention_layernorm pre_feedforward_layernorm ffn_norm mlp gate_proj up_proj down_proj ffn_gate ffn_up ffn_down
    post_feedforward_layernorm"""
)

GENERIC = Family("unknown", (), ())
FAMILIES = (
    Family("HunyuanVideo", (r"double_blocks\.0\.", r"txt_in\.individual_token_refiner"), _FLUX, tokens=32760),
    Family("Flux", (r"double_blocks\.0\.", r"single_blocks\.0\."), _FLUX),
    Family("SD3", (r"joint_blocks\.0\.",), _SD3),
    Family("SDXL", (r"input_blocks\.0\.", r"label_emb\."), _UNET, tokens=16384, text_tokens=77),
    Family("SD1.5", (r"input_blocks\.0\.", r"time_embed\."), _UNET, text_tokens=77),
    Family("Wan", (r"blocks\.0\.self_attn\.q$", r"patch_embedding$"), _WAN, tokens=32760),
    Family("Qwen-Image", (r"transformer_blocks\.0\.img_mod\.", r"time_text_embed\."), _QWEN),
    Family("LTX", (r"patchify_proj$", r"adaln_single\."), _LTX, tokens=6144),
    Family("T5", (r"(encoder\.block|enc\.blk)\.0\.",), _T5, tokens=512, text=True),
    Family("CLIP", (r"(text_model\.encoder\.layers|transformer\.resblocks)\.0\.",), _CLIP, tokens=77, text=True),
    Family("Llama", (r"((model\.)?layers\.0\.self_attn|blk\.0\.attn_q)",), _LLAMA, tokens=512, text=True),
)
"""In the order they are tried: of two that both match, the more special one comes first."""
