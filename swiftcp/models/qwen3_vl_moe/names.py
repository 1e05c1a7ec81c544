"""Names of Qwen3-VL-MoE's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import Direct, ExpertDirect, ExpertGateUp, FusedExperts, FusedGateUpExperts, NameTable, Prefix, Rule
from swiftcp.models.qwen3_vl.names import EMBEDDING, HEAD, decoder_rules

ROUTER = Direct(
    ("model.language_model.layers.{layer}.mlp.gate.weight",),
    ("language_model.decoder.layers.{layer}.mlp.router.weight",),
)


def fused_expert_rules(num_experts: int) -> tuple[Rule, ...]:
    """Of experts that the checkpoint has in one tensor for each layer."""
    return (
        FusedGateUpExperts(
            ("model.language_model.layers.{layer}.mlp.experts.gate_up_proj",) * 2,
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            ),
            parallel_dim=0,
            num_experts=num_experts,
        ),
        FusedExperts(
            ("model.language_model.layers.{layer}.mlp.experts.down_proj",),
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
            ),
            parallel_dim=1,
            num_experts=num_experts,
        ),
    )


def single_expert_rules(layers: str, num_experts: int) -> tuple[Rule, ...]:
    """Of experts that the checkpoint has one by one.

    Args:
        layers: what precedes a layer's number in the checkpoint's names.
    """
    return (
        ExpertGateUp(
            (
                layers + "{layer}.mlp.experts.{expert}.gate_proj.weight",
                layers + "{layer}.mlp.experts.{expert}.up_proj.weight",
            ),
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            ),
            parallel_dim=0,
            num_experts=num_experts,
        ),
        ExpertDirect(
            (layers + "{layer}.mlp.experts.{expert}.down_proj.weight",),
            (
                "language_model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
                "language_model.decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
            ),
            parallel_dim=1,
            num_experts=num_experts,
        ),
    )


def qwen3_vl_moe_name_table(hf_config: Any) -> NameTable:
    """The table of the Qwen3-VL-MoE that a `Qwen3VLMoeConfig` describes."""
    text = hf_config.text_config
    return NameTable(
        rules=(*decoder_rules(text), ROUTER, *fused_expert_rules(text.num_experts), Prefix("model.visual.", "visual.")),
        num_layers=text.num_hidden_layers,
        tied={HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {},
        base_prefix="model.",
    )
