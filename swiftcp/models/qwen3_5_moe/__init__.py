"""Qwen3.5-MoE: Qwen3.5 with experts, and one that all tokens share, in every layer of the decoder."""

from swiftcp.models.qwen3_5_moe.family import Qwen35Moe

FAMILY = Qwen35Moe()
