"""Qwen3.5, dense: gated delta nets in three layers of four, gated attention in the fourth, the tower of Qwen3-VL without deepstack."""

from swiftcp.models.qwen3_5.family import Qwen35

FAMILY = Qwen35()
