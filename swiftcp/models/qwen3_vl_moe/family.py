"""How the Qwen3-VL-MoE configuration of `transformers` describes our model: Qwen3-VL, but for the experts."""

from __future__ import annotations

from typing import Any

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.models.qwen3_vl.family import Qwen3VL
from swiftcp.models.qwen3_vl_moe.names import qwen3_vl_moe_name_table


def expert_config(text: Any) -> dict[str, Any]:
    """Fields of megatron-core's `TransformerConfig` that describe a decoder's experts.

    Args:
        text: a `text_config`; its layers are dense where `mlp_only_layers` or `decoder_sparse_step` say so.
    """
    sparse = [
        layer not in (text.mlp_only_layers or ()) and (layer + 1) % text.decoder_sparse_step == 0 for layer in range(text.num_hidden_layers)
    ]
    return {
        "num_moe_experts": text.num_experts,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_layer_freq": [int(has_experts) for has_experts in sparse],
        "moe_router_load_balancing_type": "aux_loss",
    }


class Qwen3VLMoe(Qwen3VL):
    """See `swiftcp.models.family.Family`."""

    model_type = "qwen3_vl_moe"
    architecture = "Qwen3VLMoeForConditionalGeneration"

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        return super().decoder_config(hf_config) | expert_config(hf_config.text_config)

    def name_table(self, hf_config: Any) -> NameTable:
        return qwen3_vl_moe_name_table(hf_config)
