"""Rotary position embedding over three position axes (time, height, width), always in float32.

Su et al. 2021, https://arxiv.org/abs/2104.09864; three axes: Wang et al. 2024, https://arxiv.org/abs/2409.12191; interleaved
sections as `transformers` computes them for Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MultimodalRotary(nn.Module):
    """Phases of tokens from their [3, B, S] positions.

    `inv_freq` is no buffer on purpose: casting the model to bfloat16 casts buffers, after which the phase of position 32k is
    off by many turns.
    """

    def __init__(self, head_dim: int, base: float, sections: Sequence[int]) -> None:
        """`sections`: how many of the head_dim / 2 frequencies follow time, height and width."""
        super().__init__()
        if sum(sections) != head_dim // 2:
            raise ValueError(f"mrope sections {list(sections)} must add up to half of head_dim {head_dim}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inv_freq = 1.0 / (base**exponents)
        self.axis_of_frequency = self._axes(sections)

    @staticmethod
    def _axes(sections: Sequence[int]) -> Tensor:
        """[head_dim / 2] which axis each frequency follows: t h w t h w ..., then t for what is left."""
        axes = torch.zeros(sum(sections), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : sections[axis] * 3 : 3] = axis
        return axes

    def forward(self, position_ids_3BS: Tensor) -> Tensor:
        """Phases in radians, [S, B, 1, head_dim] float32, the second half of a head's values like the first."""
        inv_freq = self.inv_freq.to(position_ids_3BS.device, non_blocking=True)
        axes = self.axis_of_frequency.to(position_ids_3BS.device, non_blocking=True)
        # [3, B, S] -> [S, B, 3] -> each frequency its axis: [S, B, head_dim / 2]
        phases = position_ids_3BS.permute(2, 1, 0).float()[..., axes] * inv_freq
        return torch.cat((phases, phases), dim=-1).unsqueeze(2)
