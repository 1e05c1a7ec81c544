"""Floating-point operations that the model itself needs for a micro-batch, and what devices can do.

Counted are matrix products, forward and backward (three times the forward), causal attention as causal, only real tokens, the
head only where there is a label. What is computed again in the backward pass, and padding, do not count.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from swiftcp.data.batch import AudioItems, Batch, VisualItems
from swiftcp.models.towers import Geometry, TowerGeometry
from swiftcp.parallel.gated_delta_net import is_linear
from swiftcp.parallel.moe import has_experts

PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "H200": 989.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
"""Dense bfloat16, from the vendor's data sheets, by a part of the device's name; the longest part that matches counts."""


def peak_tflops(device_name: str) -> float | None:
    """Peak of one device in bfloat16, or None where it is not known."""
    matches = [part for part in PEAK_TFLOPS if part in device_name]
    return PEAK_TFLOPS[max(matches, key=len)] if matches else None


def _attention_weights(config: TransformerConfig) -> int:
    """Entries of an attention layer's matrices, those of a gate included."""
    heads = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    return config.hidden_size * ((3 if config.attention_output_gate else 2) * heads + 2 * groups)


def _delta_weights(config: TransformerConfig) -> int:
    """What a token is multiplied with in a gated delta net: projections, filters, and the state, which is read twice and written once."""
    num_values = config.linear_num_value_heads or 0
    keys = (config.linear_num_key_heads or 0) * (config.linear_key_head_dim or 0)
    values = num_values * (config.linear_value_head_dim or 0)
    projections = config.hidden_size * (2 * keys + 3 * values + 2 * num_values)
    return projections + (config.linear_conv_kernel_dim or 0) * (2 * keys + values) + 3 * values * (config.linear_key_head_dim or 0)


def _decoder_weights(config: TransformerConfig) -> int:
    """Entries of the decoder layers' matrices that each token meets: of experts, those that it is sent to."""
    weights = 0
    for layer in range(config.num_layers):
        if has_experts(config, layer):
            width = 3 * config.moe_router_topk * config.moe_ffn_hidden_size + config.num_moe_experts
            width += 3 * (config.moe_shared_expert_intermediate_size or 0) + config.moe_shared_expert_gate
        else:
            width = 3 * config.ffn_hidden_size
        mixer = _delta_weights(config) if is_linear(config, layer) else _attention_weights(config)
        weights += mixer + config.hidden_size * width
    return weights


def decoder_flops(config: TransformerConfig, lengths: tuple[int, ...]) -> float:
    """Forward pass of the decoder's layers over samples of these true lengths."""
    linear = 2 * _decoder_weights(config) * sum(lengths)
    # two products of [L, d] and [d, L], half of each behind the causal mask: 2 * (2 * L * L * d) / 2 a head
    attention = 2 * config.num_attention_heads * config.kv_channels * sum(length * length for length in lengths)
    num_attention_layers = sum(not is_linear(config, layer) for layer in range(config.num_layers))
    return float(linear + num_attention_layers * attention)


def tower_flops(geometry: TowerGeometry, items: VisualItems | AudioItems) -> float:
    """Forward pass of a tower over all that a micro-batch gives it."""
    return 2.0 * sum(geometry.multiplications(unit) for unit in geometry.units(items).tolist())


def training_flops(config: TransformerConfig, geometry: Geometry, vocab_size: int, batch: Batch) -> float:
    """Forward and backward pass of one micro-batch."""
    forward = decoder_flops(config, batch.lengths) + 2 * config.hidden_size * vocab_size * batch.num_labels
    for name, of_tower in geometry.items():
        if (items := getattr(batch, name)) is not None:
            forward += tower_flops(of_tower, items)
    return 3.0 * forward
