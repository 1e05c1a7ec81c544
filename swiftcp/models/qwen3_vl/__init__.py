"""Qwen3-VL, dense: text, images and videos; deepstack; interleaved multimodal rotary embedding."""

from swiftcp.models.qwen3_vl.family import Qwen3VL

FAMILY = Qwen3VL()
