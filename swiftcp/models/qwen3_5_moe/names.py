"""Names of Qwen3.5-MoE's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`.

It writes experts one by one; checkpoints that have all of a layer in one tensor are read, and written, too.
"""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import Direct, GateUp, NameTable, Prefix, Rule
from swiftcp.models.qwen3_5.names import MTP, ZERO_CENTERED, delta_rules, gated_rules
from swiftcp.models.qwen3_vl.names import EMBEDDING, HEAD
from swiftcp.models.qwen3_vl_moe.names import ROUTER, fused_expert_rules, single_expert_rules

SHARED_EXPERT: tuple[Rule, ...] = (
    GateUp(
        (
            "model.language_model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
            "model.language_model.layers.{layer}.mlp.shared_expert.up_proj.weight",
        ),
        ("language_model.decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight",),
        parallel_dim=0,
    ),
    Direct(
        ("model.language_model.layers.{layer}.mlp.shared_expert.down_proj.weight",),
        ("language_model.decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight",),
        parallel_dim=1,
    ),
    Direct(
        ("model.language_model.layers.{layer}.mlp.shared_expert_gate.weight",),
        ("language_model.decoder.layers.{layer}.mlp.shared_experts.gate_weight",),
    ),
)


def qwen3_5_moe_name_table(hf_config: Any) -> NameTable:
    """The table of the Qwen3.5-MoE that a `Qwen3_5MoeConfig` describes."""
    text = hf_config.text_config
    experts = (ROUTER, *single_expert_rules("model.language_model.layers.", text.num_experts), *SHARED_EXPERT)
    return NameTable(
        rules=(*gated_rules(text), *delta_rules(text), *experts, Prefix("model.visual.", "visual.")),
        num_layers=text.num_hidden_layers,
        tied={HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {},
        base_prefix="model.",
        carried=(MTP,),
        zero_centered=ZERO_CENTERED,
        alternatives=fused_expert_rules(text.num_experts),
    )
