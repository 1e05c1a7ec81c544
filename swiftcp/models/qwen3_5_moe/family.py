"""How the Qwen3.5-MoE configuration of `transformers` describes our model: Qwen3.5, but for the experts."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.models.qwen3_5.family import Qwen35
from swiftcp.models.qwen3_5_moe.names import qwen3_5_moe_name_table


class Qwen35Moe(Qwen35):
    """See `swiftcp.models.family.Family`."""

    model_type = "qwen3_5_moe"
    architecture = "Qwen3_5MoeForConditionalGeneration"

    def feed_forward_config(self, text: Any) -> dict[str, Any]:
        return {
            "ffn_hidden_size": text.shared_expert_intermediate_size,
            "num_moe_experts": text.num_experts,
            "moe_router_topk": text.num_experts_per_tok,
            "moe_ffn_hidden_size": text.moe_intermediate_size,
            "moe_layer_freq": [1] * text.num_hidden_layers,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_shared_expert_intermediate_size": text.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }

    def name_table(self, hf_config: Any) -> NameTable:
        return qwen3_5_moe_name_table(hf_config)
