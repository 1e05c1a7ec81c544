"""How the dense Qwen3.5 configuration of `transformers` describes our model."""

from __future__ import annotations

from typing import Any

from torch import nn

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.models.qwen3_5.names import qwen3_5_name_table
from swiftcp.models.qwen3_5.tower import Qwen35Tower
from swiftcp.models.qwen3_vl.family import Qwen3VL
from swiftcp.models.rotary import MultimodalRotary
from swiftcp.parallel.layer_specs import Backend


class Qwen35(Qwen3VL):
    """See `swiftcp.models.family.Family`."""

    model_type = "qwen3_5"
    architecture = "Qwen3_5ForConditionalGeneration"
    aligner_prefixes: tuple[str, ...] = ("visual.merger.",)

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        text = hf_config.text_config
        return super().decoder_config(hf_config) | {
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "linear_attention_freq": [int(layer == "linear_attention") for layer in text.layer_types],
            "linear_conv_kernel_dim": text.linear_conv_kernel_dim,
            "linear_key_head_dim": text.linear_key_head_dim,
            "linear_value_head_dim": text.linear_value_head_dim,
            "linear_num_key_heads": text.linear_num_key_heads,
            "linear_num_value_heads": text.linear_num_value_heads,
        }

    def rotary(self, hf_config: Any) -> MultimodalRotary:
        """Of the first values of each head alone."""
        text = hf_config.text_config
        rope = text.rope_parameters
        return MultimodalRotary(int(text.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"], rope["mrope_section"])

    def build_towers(self, hf_config: Any, backend: Backend) -> dict[str, nn.Module]:
        tower = Qwen35Tower._from_config(hf_config.vision_config)
        if backend == "te":
            tower.use_transformer_engine()
        return {"visual": tower}

    def name_table(self, hf_config: Any) -> NameTable:
        return qwen3_5_name_table(hf_config)
