"""Names of Qwen3-VL-MoE's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import Direct, FusedExperts, FusedGateUpExperts, NameTable, Prefix
from swiftcp.models.qwen3_vl.names import EMBEDDING, HEAD, decoder_rules

ROUTER = Direct(
    ("model.language_model.layers.{layer}.mlp.gate.weight",),
    ("language_model.decoder.layers.{layer}.mlp.router.weight",),
)


def qwen3_vl_moe_name_table(hf_config: Any) -> NameTable:
    """The table of the Qwen3-VL-MoE that a `Qwen3VLMoeConfig` describes."""
    text = hf_config.text_config
    experts = (
        FusedGateUpExperts(
            ("model.language_model.layers.{layer}.mlp.experts.gate_up_proj",) * 2,
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            ),
            parallel_dim=0,
            num_experts=text.num_experts,
        ),
        FusedExperts(
            ("model.language_model.layers.{layer}.mlp.experts.down_proj",),
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
            ),
            parallel_dim=1,
            num_experts=text.num_experts,
        ),
    )
    return NameTable(
        rules=(*decoder_rules(text), ROUTER, *experts, Prefix("model.visual.", "visual.")),
        num_layers=text.num_hidden_layers,
        tied={HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {},
        base_prefix="model.",
    )
