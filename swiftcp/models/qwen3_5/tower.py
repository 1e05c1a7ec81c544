"""Qwen3.5's vision tower: Qwen3-VL's without deepstack."""

from __future__ import annotations

from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from swiftcp.models.qwen3_vl.tower import VisionTower


class Qwen35Tower(VisionTower, Qwen3_5VisionModel):
    """See `swiftcp.models.towers.Tower`."""
