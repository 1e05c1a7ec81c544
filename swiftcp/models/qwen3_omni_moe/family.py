"""How the Qwen3-Omni-MoE configuration of `transformers` describes our model: its thinker is Qwen3-VL-MoE with ears.

A checkpoint is the whole model (thinker, talker, code2wav), or the thinker alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.models.family import multimodal_config
from swiftcp.models.qwen3_omni_moe.names import qwen3_omni_name_table
from swiftcp.models.qwen3_omni_moe.positions import OmniTokens, qwen3_omni_position_ids
from swiftcp.models.qwen3_omni_moe.tower import Qwen3OmniAudioTower, Qwen3OmniVisionTower, audio_geometry
from swiftcp.models.qwen3_vl.family import expect
from swiftcp.models.qwen3_vl.tower import vision_geometry
from swiftcp.models.qwen3_vl_moe.family import Qwen3VLMoe
from swiftcp.models.rotary import MultimodalRotary
from swiftcp.models.towers import Geometry
from swiftcp.parallel.layer_specs import Backend


class Qwen3OmniMoe(Qwen3VLMoe):
    """See `swiftcp.models.family.Family`."""

    model_type = "qwen3_omni_moe"
    architecture = "Qwen3OmniMoeThinkerForConditionalGeneration"
    aligner_prefixes = ("visual.merger.", "visual.merger_list.", "audio.proj1.", "audio.proj2.")

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        thinker = multimodal_config(hf_config)
        expect("norm_topk_prob", thinker.text_config.norm_topk_prob, True)
        return super().decoder_config(thinker)

    def vocab_size(self, hf_config: Any) -> int:
        return super().vocab_size(multimodal_config(hf_config))

    def max_sequence_length(self, hf_config: Any) -> int:
        return super().max_sequence_length(multimodal_config(hf_config))

    def tied_head(self, hf_config: Any) -> bool:
        return super().tied_head(multimodal_config(hf_config))

    def rotary(self, hf_config: Any) -> MultimodalRotary:
        return super().rotary(multimodal_config(hf_config))

    def build_towers(self, hf_config: Any, backend: Backend) -> dict[str, nn.Module]:
        thinker = multimodal_config(hf_config)
        visual = Qwen3OmniVisionTower._from_config(thinker.vision_config)
        audio = Qwen3OmniAudioTower._from_config(thinker.audio_config)
        if backend == "te":
            visual.use_transformer_engine()
            audio.use_transformer_engine()
        return {"visual": visual, "audio": audio}

    def tower_geometry(self, hf_config: Any) -> Geometry:
        thinker = multimodal_config(hf_config)
        return {"visual": vision_geometry(thinker.vision_config), "audio": audio_geometry(thinker.audio_config)}

    def position_ids(
        self,
        hf_config: Any,
        input_ids_L: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        seconds_per_grid_W: Tensor | None,
    ) -> Tensor:
        thinker = multimodal_config(hf_config)
        tokens = OmniTokens(
            thinker.image_token_id,
            thinker.video_token_id,
            thinker.audio_token_id,
            thinker.position_id_per_seconds,
            thinker.vision_config.spatial_merge_size,
        )
        return qwen3_omni_position_ids(input_ids_L, image_grid_thw, video_grid_thw, seconds_per_grid_W, tokens)

    def name_table(self, hf_config: Any) -> NameTable:
        return qwen3_omni_name_table(hf_config)
