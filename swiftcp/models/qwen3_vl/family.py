"""How the dense Qwen3-VL configuration of `transformers` describes our model."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.errors import ConfigError
from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table
from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids
from swiftcp.models.qwen3_vl.tower import Qwen3VLTower, vision_geometry
from swiftcp.models.rotary import MultimodalRotary
from swiftcp.models.towers import Geometry
from swiftcp.parallel.layer_specs import Backend


def expect(key: str, value: Any, built: Any) -> None:
    """Refuse a configuration of text_config that none of the published models has.

    Raises:
        ConfigError: names key and value.
    """
    if value != built:
        raise ConfigError(
            f"config.json: text_config.{key} is {value!r}, but the family is built for {built!r} alone: use a checkpoint that has it"
        )


class Qwen3VL:
    """See `swiftcp.models.family.Family`."""

    model_type = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"
    aligner_prefixes: tuple[str, ...] = ("visual.merger.", "visual.deepstack_merger_list.")

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        text = hf_config.text_config
        expect("hidden_act", text.hidden_act, "silu")
        expect("attention_bias", text.attention_bias, False)
        expect("rope_type", text.rope_parameters.get("rope_type", "default"), "default")
        return {
            "num_layers": text.num_hidden_layers,
            "hidden_size": text.hidden_size,
            "num_attention_heads": text.num_attention_heads,
            "num_query_groups": text.num_key_value_heads,
            "kv_channels": text.head_dim,
            "layernorm_epsilon": text.rms_norm_eps,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            **self.feed_forward_config(text),
        }

    def feed_forward_config(self, text: Any) -> dict[str, Any]:
        """Of these fields, those that describe what follows a layer's attention."""
        return {"ffn_hidden_size": text.intermediate_size}

    def vocab_size(self, hf_config: Any) -> int:
        return hf_config.text_config.vocab_size

    def max_sequence_length(self, hf_config: Any) -> int:
        return hf_config.text_config.max_position_embeddings

    def tied_head(self, hf_config: Any) -> bool:
        return hf_config.tie_word_embeddings

    def rotary(self, hf_config: Any) -> MultimodalRotary:
        text = hf_config.text_config
        rope = text.rope_parameters
        return MultimodalRotary(text.head_dim, rope["rope_theta"], rope["mrope_section"])

    def build_towers(self, hf_config: Any, backend: Backend) -> dict[str, nn.Module]:
        tower = Qwen3VLTower._from_config(hf_config.vision_config)
        if backend == "te":
            tower.use_transformer_engine()
        return {"visual": tower}

    def tower_geometry(self, hf_config: Any) -> Geometry:
        return {"visual": vision_geometry(hf_config.vision_config)}

    def position_ids(
        self,
        hf_config: Any,
        input_ids_L: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        seconds_per_grid_W: Tensor | None,
    ) -> Tensor:
        """Timestamps in the text tell the time of a video's frames, so that `seconds_per_grid_W` plays no part."""
        return qwen3_vl_position_ids(
            input_ids_L,
            image_grid_thw,
            video_grid_thw,
            image_token_id=hf_config.image_token_id,
            video_token_id=hf_config.video_token_id,
            spatial_merge_size=hf_config.vision_config.spatial_merge_size,
        )

    def name_table(self, hf_config: Any) -> NameTable:
        return qwen3_vl_name_table(hf_config)
