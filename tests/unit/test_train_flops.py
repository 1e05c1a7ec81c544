"""Counts of floating-point operations, against naive loops over matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftcp.data.batch import Sample, VisualItems, collate_pack
from swiftcp.models.towers import VisionGeometry
from swiftcp.trainers.flops import decoder_flops, peak_tflops, tower_flops, training_flops

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, LAYERS = 8, 12, 4, 2, 3, 5
CONFIG: Any = SimpleNamespace(
    hidden_size=HIDDEN,
    ffn_hidden_size=FFN,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    kv_channels=HEAD_DIM,
    num_layers=LAYERS,
    num_moe_experts=None,
    linear_attention_freq=None,
    attention_output_gate=False,
)
GEOMETRY = VisionGeometry(merge_size=2, patch_values=6, num_layers=3, hidden_size=4, intermediate_size=7, prepare_grids=lambda grid: {})


def frames(*grids: tuple[int, int, int]) -> VisualItems:
    return VisualItems(torch.empty(0, 6), torch.tensor(grids), torch.empty(0, dtype=torch.int64))


def product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def naive_decoder(length: int) -> int:
    query, key_value = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    linear = product(length, HIDDEN, query) + 2 * product(length, HIDDEN, key_value) + product(length, query, HIDDEN)
    linear += 2 * product(length, HIDDEN, FFN) + product(length, FFN, HIDDEN)
    attention = HEADS * (product(length, HEAD_DIM, length) + product(length, length, HEAD_DIM)) // 2
    return LAYERS * (linear + attention)


def test_decoder_flops_are_those_of_its_products() -> None:
    assert decoder_flops(CONFIG, (10, 4)) == naive_decoder(10) + naive_decoder(4)


def test_a_token_meets_the_router_and_the_experts_it_is_sent_to() -> None:
    sparse = SimpleNamespace(
        **vars(CONFIG)
        | dict(num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=7, moe_layer_freq=[1, 0, 1, 1, 1])
        | dict(moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False)
    )
    dense = 2 * product(10, HIDDEN, FFN) + product(10, FFN, HIDDEN)
    experts = product(10, HIDDEN, 6) + 2 * (2 * product(10, HIDDEN, 7) + product(10, 7, HIDDEN))
    assert decoder_flops(sparse, (10,)) == naive_decoder(10) + 4 * (experts - dense)


def test_delta_nets_cost_the_same_for_each_token() -> None:
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=3, linear_value_head_dim=5, linear_conv_kernel_dim=4)
    linear = SimpleNamespace(**vars(CONFIG) | sizes | dict(linear_attention_freq=[1] * LAYERS))
    feed_forward = 2 * product(10, HIDDEN, FFN) + product(10, FFN, HIDDEN)
    projections = 2 * product(10, HIDDEN, 6) + 2 * product(10, HIDDEN, 20) + 2 * product(10, HIDDEN, 4) + product(10, 20, HIDDEN)
    filters, states = product(10, 4, 6 + 6 + 20), 3 * 4 * product(10, 3, 5)
    assert decoder_flops(linear, (10,)) == LAYERS * (feed_forward + projections + filters + states)


def test_tower_flops_are_those_of_its_products() -> None:
    def naive(patches: int) -> int:
        linear = 4 * product(patches, 4, 4) + product(patches, 4, 7) + product(patches, 7, 4)
        return 3 * (linear + product(patches, 4, patches) + product(patches, patches, 4))

    assert tower_flops(GEOMETRY, frames((1, 2, 4), (1, 4, 4))) == naive(8) + naive(16)


def test_padding_and_unlabelled_tokens_do_not_count() -> None:
    labels = torch.tensor([-100, 5, 6, -100, 7])
    visual = VisualItems(torch.zeros(8, 6), torch.tensor([[1, 2, 4]]), torch.tensor([1, 2]))
    sample = Sample(0, torch.arange(5), labels, (labels > 0).float(), torch.zeros(3, 5, dtype=torch.int64), visual)
    batch = collate_pack([sample], pack_align=8, pad_token_id=0, total_length=32)
    expected = naive_decoder(5) + product(3, HIDDEN, 100) + tower_flops(GEOMETRY, visual)
    assert training_flops(CONFIG, {"visual": GEOMETRY}, 100, batch) == 3 * expected


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989.0), ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GeForce", None)]
)
def test_peak_is_that_of_the_longest_matching_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
