"""Qwen3-Omni-MoE's thinker: text, images, videos, sound, and sound in videos; a decoder of experts with deepstack."""

from swiftcp.models.qwen3_omni_moe.family import Qwen3OmniMoe

FAMILY = Qwen3OmniMoe()
