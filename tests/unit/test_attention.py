"""Core attention of each context-parallel rank against a naive loop, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swiftcp.parallel.attention import chunked_causal_attention
from swiftcp.parallel.context import split_cp_inputs
from swiftcp.parallel.packed import PackedStream


def naive_causal_attention(query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor) -> Tensor:
    """One sequence, one head and one query after the other, in float64."""
    output = torch.zeros_like(query_LHD, dtype=torch.float64)
    per_group = query_LHD.size(1) // key_LGD.size(1)
    for head in range(query_LHD.size(1)):
        for position in range(query_LHD.size(0)):
            keys = key_LGD[: position + 1, head // per_group].double()
            scores = keys @ query_LHD[position, head].double() / math.sqrt(query_LHD.size(2))
            output[position, head] = scores.softmax(0) @ value_LGD[: position + 1, head // per_group].double()
    return output


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_chunks_of_each_rank_equal_the_naive_loop(cp_size: int, num_groups: int) -> None:
    length, heads, head_dim = 12, 4, 8
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, length, heads, head_dim, generator=generator)
    key, value = (torch.randn(2, length, num_groups, head_dim, generator=generator) for _ in range(2))
    expected = torch.stack([naive_causal_attention(q, k, v) for q, k, v in zip(query, key, value, strict=True)])
    for rank in range(cp_size):
        local_query = split_cp_inputs(query, None, 1, cp_size=cp_size, cp_rank=rank)
        output = chunked_causal_attention(
            local_query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), cp_size=cp_size, cp_rank=rank, scale=head_dim**-0.5
        )
        local_expected = split_cp_inputs(expected, None, 1, cp_size=cp_size, cp_rank=rank)
        assert (output.transpose(1, 2) - local_expected).abs().max() < 1e-6


def test_groups_of_a_pack_hold_every_sequence_once() -> None:
    ends = (0, 8, 12, 20, 20, 24)
    stream = PackedStream(torch.tensor(ends, dtype=torch.int32), ends, 8)
    groups = stream.groups(cp_size=2)
    assert [group.length for group in groups] == [8, 4]
    assert groups[0].local_slots.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert groups[1].local_slots.tolist() == [4, 5, 10, 11]
    # Rank 0 holds tokens 0 1 6 7 | 8 11 | 12 13 18 19 | 20 23, rank 1 the others.
    assert groups[0].gathered_slots.tolist() == [0, 1, 12, 13, 14, 15, 2, 3, 6, 7, 18, 19, 20, 21, 8, 9]
    assert groups[1].gathered_slots.tolist() == [4, 16, 17, 5, 10, 22, 23, 11]
    assert stream.groups(cp_size=2) is groups, "computed once for a pack"


def test_a_pack_has_one_tensor_for_all_lengths_and_host_integers() -> None:
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    stream = PackedStream(cu_seqlens, (0, 8, 12), 8)
    fields = (stream.cu_seqlens_q, stream.cu_seqlens_kv, stream.cu_seqlens_q_padded, stream.cu_seqlens_kv_padded)
    assert all(field is cu_seqlens for field in fields)
    assert type(stream.max_seqlen_q) is int and stream.pad_between_seqs is False
