"""Qwen3-VL's vision tower: that of `transformers`, with its attention and patch embedding made for many frames at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from swiftcp.models.tower_layers import FrameAttention, FrameLayout, LinearPatchEmbedding, frame_attention, fused_frame_attention
from swiftcp.models.towers import VisionGeometry
from swiftcp.parallel.layer_specs import apply_rotary_fused


class _Attention(nn.Module):
    """The tower's attention, without a loop over frames. Parameters keep their names."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.num_heads, self.head_dim, self.scaling = attention.num_heads, attention.head_dim, attention.scaling
        self.attend: FrameAttention = frame_attention
        self.fused_rotary = False

    def use_transformer_engine(self) -> None:
        """Take its attention and rotary kernels from now on."""
        self.attend = fused_frame_attention(self.num_heads, self.head_dim, self.scaling)
        self.fused_rotary = True

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], phases: Tensor, frames: FrameLayout, **_: Any
    ) -> Tensor:
        """[P, hidden] -> [P, hidden]. `position_embeddings` are the cosines and sines of `phases`, [P, 1, 1, head_dim]."""
        query, key, value = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        if self.fused_rotary:
            query, key = (apply_rotary_fused(heads[:, None], phases)[:, 0] for heads in (query, key))
        else:
            query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        return self.proj(self.attend(query, key, value, frames, self.scaling).flatten(1))


class VisionTower:
    """What turns a vision model of this kind in `transformers` into a `swiftcp.models.towers.Tower`; inherit it first."""

    patch_embed: Any
    pos_embed: Any
    blocks: Any
    merger: Any
    deepstack_merger_list: Any
    rotary_pos_emb: Any
    config: Any

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        cast(Any, super()).__init__(config, *inputs, **kwargs)
        self.patch_embed = LinearPatchEmbedding(self.patch_embed.proj)
        for block in self.blocks:
            block.attn = _Attention(block.attn)

    def use_transformer_engine(self) -> None:
        """Take its attention and rotary kernels from now on."""
        for block in self.blocks:
            block.attn.use_transformer_engine()

    @property
    def _levels(self) -> list[int]:
        """Blocks behind which features for the decoder's first layers are taken; Qwen3.5 has none."""
        return getattr(self.config, "deepstack_visual_indexes", [])

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(1 + levels, H)."""
        return 1 + len(self._levels), self.config.out_hidden_size

    def parts(self) -> Iterator[nn.Module]:
        """Modules that together have all parameters, in the order of their use."""
        levels = self._levels
        yield from (self.patch_embed, self.pos_embed)
        for number, block in enumerate(self.blocks):
            yield block
            if number in levels:
                yield self.deepstack_merger_list[levels.index(number)]
        yield self.merger

    def _phases(self, position_ids_P2: Tensor) -> Tensor:
        """Radians, [P, 1, 1, head_dim] float32; `transformers` keeps their cosines and sines alone."""
        rotary = self.rotary_pos_emb
        phases = rotary.recomposition_frequencies(position_ids_P2[..., None].float() * rotary.inv_freq.float())
        return phases[:, None, None]

    def encode(self, patches_PD: Tensor, grid_thw: Tensor, prepared: dict[str, Any]) -> Tensor:
        """[features, 1 + levels, H]: the main features, then the deepstack levels."""
        phases = self._phases(prepared["position_ids"])
        output = cast(Any, self)(patches_PD, grid_thw=grid_thw, return_dict=True, phases=phases, **prepared)
        return torch.stack([output.pooler_output, *(output.deepstack_features if self._levels else ())], dim=1)


class Qwen3VLTower(VisionTower, Qwen3VLVisionModel):
    """See `swiftcp.models.towers.Tower`."""


def vision_geometry(vision_config: Any) -> VisionGeometry:
    """Of a tower of this kind."""
    return VisionGeometry(
        merge_size=vision_config.spatial_merge_size,
        patch_values=vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2,
        num_layers=vision_config.depth,
        hidden_size=vision_config.hidden_size,
        intermediate_size=vision_config.intermediate_size,
        prepare_grids=partial(prepare, vision_config),
    )


def prepare(vision_config: Any, grid_thw: Tensor) -> dict[str, Any]:
    """What the tower's forward pass would compute from the grids, on the host: positions, interpolation, frames.

    Args:
        grid_thw: [U, 3], one frame each.
    """
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw,
        num_grid_per_side=int(vision_config.num_position_embeddings**0.5),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=vision_config.spatial_merge_size,
    )
    frames = FrameLayout.of(grid_thw.prod(-1).tolist())
    return {
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": get_vision_position_ids(grid_thw, vision_config.spatial_merge_size),
        "cu_seqlens": frames.cu_seqlens,
        "max_seqlen": frames.max_patches,
        "frames": frames,
    }
