"""From tensors to blocks: which family, which order, what each block computes."""

from __future__ import annotations

import pytest

from multigpu.errors import InputError
from multigpu.files import TensorInfo, describe_model
from multigpu.files.families import FLOPS, retimed
from multigpu.plan import Reason

from .model_files import Tensors, flux_tensors, linear


def infos(tensors: Tensors) -> list[TensorInfo]:
    made = [TensorInfo(name, "BF16", shape, 0) for name, shape in tensors.items()]
    return [TensorInfo(t.name, t.dtype, t.shape, 2 * t.elements) for t in made]


def weights(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (8, 8) for name in names}


ORDERS = {
    "Flux": "img_in time_in.in_layer time_in.out_layer txt_in double_blocks.0.img_mod.lin double_blocks.0.txt_mod.lin "
    "double_blocks.0.img_attn.qkv double_blocks.0.txt_attn.qkv double_blocks.0.img_attn.proj double_blocks.0.img_mlp.0 "
    "double_blocks.0.img_mlp.2 double_blocks.0.txt_attn.proj double_blocks.0.txt_mlp.0 double_blocks.2.img_mod.lin "
    "double_blocks.10.img_mod.lin single_blocks.0.modulation.lin single_blocks.0.linear1 single_blocks.0.linear2 "
    "final_layer.adaLN_modulation.1 final_layer.linear",
    "HunyuanVideo": "img_in.proj time_in.in_layer txt_in.individual_token_refiner.blocks.0.mlp.0 "
    "double_blocks.0.img_mod.linear double_blocks.0.img_attn_qkv double_blocks.0.txt_attn_qkv "
    "double_blocks.0.img_attn_proj single_blocks.0.linear1 final_layer.linear",
    "SD3": "x_embedder.proj t_embedder.mlp.0 y_embedder.mlp.0 context_embedder joint_blocks.0.context_block.attn.qkv "
    "joint_blocks.0.x_block.attn.qkv joint_blocks.0.x_block.attn.proj joint_blocks.0.context_block.mlp.fc1 "
    "joint_blocks.0.x_block.mlp.fc1 joint_blocks.0.x_block.mlp.fc2 joint_blocks.9.x_block.attn.qkv "
    "joint_blocks.10.x_block.attn.qkv final_layer.linear",
    "SDXL": "time_embed.0 label_emb.0.0 input_blocks.0.0 input_blocks.1.0.in_layers.2 input_blocks.1.0.emb_layers.1 "
    "input_blocks.1.0.out_layers.3 input_blocks.4.1.norm input_blocks.4.1.proj_in "
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q input_blocks.4.1.transformer_blocks.0.attn2.to_k "
    "input_blocks.4.1.transformer_blocks.0.ff.net.0.proj input_blocks.4.1.proj_out middle_block.0.in_layers.2 "
    "output_blocks.0.0.in_layers.2 output_blocks.8.0.skip_connection out.2",
    "SD1.5": "time_embed.0 input_blocks.0.0 input_blocks.2.0.in_layers.2 input_blocks.11.0.in_layers.2 "
    "middle_block.1.proj_in output_blocks.3.0.in_layers.2 out.0",
    "Wan": "patch_embedding text_embedding.0 time_embedding.0 time_projection.1 blocks.0.self_attn.q "
    "blocks.0.self_attn.k blocks.0.self_attn.v blocks.0.self_attn.o blocks.0.cross_attn.q blocks.0.cross_attn.o "
    "blocks.0.ffn.0 blocks.0.ffn.2 blocks.9.ffn.0 blocks.10.self_attn.q head.head",
    "Qwen-Image": "img_in txt_in time_text_embed.timestep_embedder.linear_1 transformer_blocks.0.img_mod.1 "
    "transformer_blocks.0.txt_mod.1 transformer_blocks.0.attn.to_q transformer_blocks.0.attn.add_q_proj "
    "transformer_blocks.0.attn.to_out.0 transformer_blocks.0.attn.to_add_out transformer_blocks.0.img_mlp.net.0.proj "
    "transformer_blocks.0.txt_mlp.net.2 norm_out.linear proj_out",
    "LTX": "patchify_proj adaln_single.linear caption_projection.linear_1 transformer_blocks.0.attn1.to_q "
    "transformer_blocks.0.attn1.to_out.0 transformer_blocks.0.attn2.to_k transformer_blocks.0.ff.net.2 proj_out",
    "T5": "shared encoder.block.0.layer.0.layer_norm encoder.block.0.layer.0.SelfAttention.q "
    "encoder.block.0.layer.0.SelfAttention.o encoder.block.0.layer.1.DenseReluDense.wi_0 "
    "encoder.block.0.layer.1.DenseReluDense.wo encoder.block.11.layer.0.SelfAttention.q encoder.final_layer_norm",
    "CLIP": "text_model.embeddings.token_embedding text_model.encoder.layers.0.layer_norm1 "
    "text_model.encoder.layers.0.self_attn.q_proj text_model.encoder.layers.0.self_attn.out_proj "
    "text_model.encoder.layers.0.mlp.fc1 text_model.encoder.layers.11.mlp.fc2 text_model.final_layer_norm",
    "Llama": "model.embed_tokens model.layers.0.input_layernorm model.layers.0.self_attn.q_proj "
    "model.layers.0.self_attn.o_proj model.layers.0.post_attention_layernorm model.layers.0.mlp.gate_proj "
    "model.layers.0.mlp.down_proj model.layers.30.self_attn.q_proj model.norm lm_head",
}


@pytest.mark.parametrize("family", ORDERS)
def test_each_family_comes_in_order_of_execution(family: str) -> None:
    """The file has the modules in alphabetical order, as safetensors writes them; blocks come as they run."""
    expected = ORDERS[family].split()
    model = describe_model(infos(weights(*sorted(expected))))
    assert model.family == family
    assert [block.name for block in model.blocks] == expected
    assert [block.order for block in model.blocks] == list(range(len(expected)))


def test_a_llama_in_gguf_names() -> None:
    names = [
        "token_embd",
        "blk.0.attn_norm",
        "blk.0.attn_q",
        "blk.0.attn_output",
        "blk.0.ffn_down",
        "blk.1.attn_q",
        "output_norm",
    ]
    model = describe_model(infos(weights(*sorted(names))))
    assert model.family == "Llama"
    assert [block.name for block in model.blocks] == names


def test_an_unknown_model_goes_by_module_in_the_order_of_the_file() -> None:
    model = describe_model(
        infos({**linear("z.9", 4, 4), **linear("a.1", 4, 4), "alone": (4,), "z.9.scale_weight": (1,)})
    )
    assert model.family == "unknown"
    assert [(block.name, block.bytes) for block in model.blocks] == [("z.9", 42), ("a.1", 40), ("alone", 8)]
    assert [block.immovable for block in model.blocks] == [None, None, Reason.NOT_CASTABLE]


def test_a_norm_takes_no_time() -> None:
    model = describe_model(infos({"n.weight": (8,), "c.weight": (8, 8, 3, 3)}))
    assert model.blocks[0].compute == 0.0 and model.blocks[1].compute


def test_embeddings_of_text_encoders_stay() -> None:
    model = describe_model(infos(weights("shared", "encoder.block.0.layer.0.SelfAttention.q")))
    assert [block.immovable for block in model.blocks] == [Reason.EMBEDDING, None]
    assert model.blocks[0].compute == 0.0


def test_modulation_computes_next_to_nothing() -> None:
    blocks = {block.name: block for block in describe_model(infos(flux_tensors(2, 2))).blocks}
    mod, qkv = blocks["double_blocks.0.img_mod.lin"], blocks["double_blocks.0.img_attn.qkv"]
    text = blocks["double_blocks.0.txt_attn.qkv"]
    assert mod.compute is not None and qkv.compute is not None and text.compute is not None
    assert mod.compute / mod.bytes < 1e-3 * qkv.compute / qkv.bytes
    assert text.compute < qkv.compute


def test_estimates_follow_the_measured_compute_rate() -> None:
    blocks = describe_model(infos(flux_tensors(2, 2))).blocks
    times = [block.compute for block in blocks]
    assert [block.compute for block in retimed(blocks, FLOPS)] == times
    assert [block.compute for block in retimed(blocks, 7 * FLOPS)] == pytest.approx([(time or 0) / 7 for time in times])


def test_deep_levels_of_a_unet_see_fewer_pixels() -> None:
    names = ["time_embed.0", "input_blocks.0.0", "input_blocks.1.0.in_layers.2", "input_blocks.10.0.in_layers.2"]
    names += ["output_blocks.0.0.in_layers.2", "output_blocks.11.0.in_layers.2"]
    blocks = {block.name: block.compute or 0.0 for block in describe_model(infos(weights(*names))).blocks}
    assert blocks["input_blocks.1.0.in_layers.2"] == 64 * blocks["input_blocks.10.0.in_layers.2"]
    assert blocks["output_blocks.11.0.in_layers.2"] == 64 * blocks["output_blocks.0.0.in_layers.2"]


def test_a_step_time_scales_the_estimates() -> None:
    model = describe_model(infos(flux_tensors(2, 2)), step_seconds=0.5)
    assert sum(block.compute or 0.0 for block in model.blocks) == pytest.approx(0.5)


CHECKPOINT = {
    **flux_tensors(1, 1, prefix="model.diffusion_model."),
    **weights("cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1"),
    **weights("first_stage_model.decoder.conv_in"),
}


def test_of_a_checkpoint_one_component_is_planned() -> None:
    model = describe_model(infos(CHECKPOINT))
    assert (model.family, model.component) == ("Flux", "diffusion")
    assert model.blocks[0].name == "img_in"
    text = describe_model(infos(CHECKPOINT), "text")
    assert (text.family, len(text.blocks)) == ("CLIP", 1)
    assert describe_model(infos(CHECKPOINT), "vae").blocks[0].name == "decoder.conv_in"


def test_a_prefixed_diffusion_model_is_recognised() -> None:
    model = describe_model(infos(flux_tensors(1, 1, prefix="model.diffusion_model.")))
    assert (model.family, model.component) == ("Flux", None)
    assert model.blocks[0].name == "img_in"


def test_a_missing_component_is_named() -> None:
    with pytest.raises(InputError, match="no component 'vae'; it has only one model"):
        describe_model(infos(flux_tensors(1, 1)), "vae")
