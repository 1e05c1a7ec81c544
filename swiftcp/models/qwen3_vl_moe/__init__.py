"""Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in most layers of the decoder."""

from swiftcp.models.qwen3_vl_moe.family import Qwen3VLMoe

FAMILY = Qwen3VLMoe()
