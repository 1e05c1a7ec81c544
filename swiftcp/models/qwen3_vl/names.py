"""Names of Qwen3-VL's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import Direct, GateUp, NameTable, Prefix, QueryKeyValue, Rule, VocabularyRows

EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"


def decoder_rules(text: Any) -> tuple[Rule, ...]:
    """Of all that decoders of this family and its kin have in common: everything but what is inside a layer's experts.

    Args:
        text: the `text_config`.
    """
    return (
        VocabularyRows((EMBEDDING,), ("language_model.embedding.word_embeddings.weight",), parallel_dim=0, num_rows=text.vocab_size),
        VocabularyRows((HEAD,), ("language_model.output_layer.weight",), parallel_dim=0, num_rows=text.vocab_size),
        Direct(("model.language_model.norm.weight",), ("language_model.decoder.final_layernorm.weight",)),
        Direct(
            ("model.language_model.layers.{layer}.input_layernorm.weight",),
            (
                "language_model.decoder.layers.{layer}.input_layernorm.weight",
                "language_model.decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            ),
        ),
        QueryKeyValue(
            (
                "model.language_model.layers.{layer}.self_attn.q_proj.weight",
                "model.language_model.layers.{layer}.self_attn.k_proj.weight",
                "model.language_model.layers.{layer}.self_attn.v_proj.weight",
            ),
            ("language_model.decoder.layers.{layer}.self_attention.linear_qkv.weight",),
            parallel_dim=0,
            num_groups=text.num_key_value_heads,
            head_dim=text.head_dim,
        ),
        QueryKeyValue(
            (
                "model.language_model.layers.{layer}.self_attn.q_proj.bias",
                "model.language_model.layers.{layer}.self_attn.k_proj.bias",
                "model.language_model.layers.{layer}.self_attn.v_proj.bias",
            ),
            ("language_model.decoder.layers.{layer}.self_attention.linear_qkv.bias",),
            parallel_dim=0,
            num_groups=text.num_key_value_heads,
            head_dim=text.head_dim,
        ),
        Direct(
            ("model.language_model.layers.{layer}.self_attn.q_norm.weight",),
            ("language_model.decoder.layers.{layer}.self_attention.q_layernorm.weight",),
        ),
        Direct(
            ("model.language_model.layers.{layer}.self_attn.k_norm.weight",),
            ("language_model.decoder.layers.{layer}.self_attention.k_layernorm.weight",),
        ),
        Direct(
            ("model.language_model.layers.{layer}.self_attn.o_proj.weight",),
            ("language_model.decoder.layers.{layer}.self_attention.linear_proj.weight",),
            parallel_dim=1,
        ),
        Direct(
            ("model.language_model.layers.{layer}.post_attention_layernorm.weight",),
            (
                "language_model.decoder.layers.{layer}.pre_mlp_layernorm.weight",
                "language_model.decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            ),
        ),
        GateUp(
            (
                "model.language_model.layers.{layer}.mlp.gate_proj.weight",
                "model.language_model.layers.{layer}.mlp.up_proj.weight",
            ),
            ("language_model.decoder.layers.{layer}.mlp.linear_fc1.weight",),
            parallel_dim=0,
        ),
        Direct(
            ("model.language_model.layers.{layer}.mlp.down_proj.weight",),
            ("language_model.decoder.layers.{layer}.mlp.linear_fc2.weight",),
            parallel_dim=1,
        ),
    )


def qwen3_vl_name_table(hf_config: Any) -> NameTable:
    """The table of the dense Qwen3-VL that a `Qwen3VLConfig` describes."""
    return NameTable(
        rules=(*decoder_rules(hf_config.text_config), Prefix("model.visual.", "visual.")),
        num_layers=hf_config.text_config.num_hidden_layers,
        tied={HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {},
        base_prefix="model.",
    )
