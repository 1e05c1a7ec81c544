"""Names of Qwen3.5's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import Direct, GatedQueryKeyValue, NameTable, Prefix, QueryKeyValue, Rule, Sections
from swiftcp.models.qwen3_vl.names import EMBEDDING, HEAD, decoder_rules

MTP = "mtp."
"""Begins the names of the layers for multi-token prediction, which `transformers` does not have."""
ZERO_CENTERED = ("layernorm.weight", "language_model.norm.weight", ".q_norm.weight", ".k_norm.weight")
"""What the names of the decoder's gains end with, but for those of delta nets."""


def gated_rules(text: Any) -> tuple[Rule, ...]:
    """Of a decoder's embedding, head, norms, dense feed-forward parts and gated attention: Qwen3-VL's, but for the gate.

    Args:
        text: the `text_config`.
    """
    rules = (rule for rule in decoder_rules(text) if not rule.sources[0].endswith(".bias"))
    return tuple(_gated(rule) if isinstance(rule, QueryKeyValue) else rule for rule in rules)


def _gated(rule: QueryKeyValue) -> GatedQueryKeyValue:
    return GatedQueryKeyValue(
        rule.sources, rule.targets, parallel_dim=rule.parallel_dim, num_groups=rule.num_groups, head_dim=rule.head_dim
    )


def delta_rules(text: Any) -> tuple[Rule, ...]:
    """Of the gated delta nets.

    Args:
        text: the `text_config`.
    """
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    heads = text.linear_num_value_heads
    return (
        Sections(
            (
                *("model.language_model.layers.{layer}.linear_attn.in_proj_qkv.weight",) * 3,
                "model.language_model.layers.{layer}.linear_attn.in_proj_b.weight",
                "model.language_model.layers.{layer}.linear_attn.in_proj_a.weight",
                "model.language_model.layers.{layer}.linear_attn.in_proj_z.weight",
            ),
            ("language_model.decoder.layers.{layer}.self_attention.in_proj.weight",),
            parallel_dim=0,
            sizes=(keys, keys, values, heads, heads, values),
        ),
        Sections(
            ("model.language_model.layers.{layer}.linear_attn.conv1d.weight",) * 3,
            ("language_model.decoder.layers.{layer}.self_attention.conv1d.weight",),
            parallel_dim=0,
            sizes=(keys, keys, values),
        ),
        Direct(
            ("model.language_model.layers.{layer}.linear_attn.A_log",),
            ("language_model.decoder.layers.{layer}.self_attention.A_log",),
            parallel_dim=0,
        ),
        Direct(
            ("model.language_model.layers.{layer}.linear_attn.dt_bias",),
            ("language_model.decoder.layers.{layer}.self_attention.dt_bias",),
            parallel_dim=0,
        ),
        Direct(
            ("model.language_model.layers.{layer}.linear_attn.norm.weight",),
            ("language_model.decoder.layers.{layer}.self_attention.norm.weight",),
        ),
        Direct(
            ("model.language_model.layers.{layer}.linear_attn.out_proj.weight",),
            ("language_model.decoder.layers.{layer}.self_attention.out_proj.weight",),
            parallel_dim=1,
        ),
    )


def qwen3_5_name_table(hf_config: Any) -> NameTable:
    """The table of the dense Qwen3.5 that a `Qwen3_5Config` describes."""
    text = hf_config.text_config
    return NameTable(
        rules=(*gated_rules(text), *delta_rules(text), Prefix("model.visual.", "visual.")),
        num_layers=text.num_hidden_layers,
        tied={HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {},
        base_prefix="model.",
        carried=(MTP,),
        zero_centered=ZERO_CENTERED,
    )
