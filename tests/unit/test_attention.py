"""Core attention of each context-parallel rank against a naive loop, in one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftcp.parallel.attention import attend_in_parts, chunked_causal_attention, in_parts
from swiftcp.parallel.context import split_cp_inputs
from swiftcp.parallel.packed import PackedStream, StreamParts
from swiftcp.parallel.partition import CUT, plan_partition


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


LENGTHS = (48, 4, 8, 8, 4)
"""Of these two ranks hold 4, 8 and 8, 4 whole, and cut the 48; what is left of 8 tokens of padding goes to both."""


def stream_with_whole_sequences(rank: int) -> PackedStream:
    ends = (0, *itertools.accumulate((*LENGTHS, 8)))
    partition = plan_partition(ends, num_samples=len(LENGTHS), cp_size=2, mode="whole")
    assert partition is not None and partition.owners[:5] == (CUT, 0, 0, 1, 1)
    return PackedStream(torch.tensor(ends, dtype=torch.int32), ends, 48, StreamParts.of(partition, rank))


def heads_of_a_pack() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(80, 4, 8, generator=generator), *(torch.randn(80, 2, 8, generator=generator) for _ in range(2))  # type: ignore[return-value]


def naive_pack(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[80, 4, 8]: sequence by sequence; padding counts as one more."""
    lengths = [*LENGTHS, 8]
    parts = (tensor.split(lengths) for tensor in (query, key, value))
    return torch.cat([naive_causal_attention(*heads) for heads in zip(*parts, strict=True)])


def naive_local(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, stream: PackedStream) -> Tensor:
    """Within a rank: [T, H * D]."""
    assert stream.parts is None and query_THD.size(0) == stream.num_tokens
    lengths = [end - start for start, end in itertools.pairwise(stream.host_ends)]
    parts = (tensor.split(lengths) for tensor in (query_THD, key_TGD, value_TGD))
    return torch.cat([naive_causal_attention(*heads) for heads in zip(*parts, strict=True)]).flatten(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_sequences_and_chunks_of_a_rank_equal_the_naive_loop(rank: int) -> None:
    heads = heads_of_a_pack()
    stream = stream_with_whole_sequences(rank)
    local = [split_cp_inputs(tensor, stream.sequences, 0, cp_size=2, cp_rank=rank) for tensor in heads]

    def across_the_group(query: Tensor, key: Tensor, value: Tensor, cut: PackedStream) -> Tensor:
        assert cut.host_ends == (0, 48) and torch.equal(key, split_cp_inputs(heads[1][:48], None, 0, cp_size=2, cp_rank=rank))
        whole_query, whole_key, whole_value = (tensor[None].transpose(1, 2) for tensor in (query, heads[1][:48], heads[2][:48]))
        output = chunked_causal_attention(whole_query, whole_key, whole_value, cp_size=2, cp_rank=rank, scale=8**-0.5)
        return output[0].transpose(0, 1).flatten(1).double()

    output = attend_in_parts(*local, stream, whole=naive_local, cut=across_the_group)
    samples = split_cp_inputs(torch.arange(80), stream.sequences, 0, cp_size=2, cp_rank=rank) < sum(LENGTHS)
    expected = split_cp_inputs(naive_pack(*heads), stream.sequences, 0, cp_size=2, cp_rank=rank).flatten(1)
    assert (output - expected)[samples].abs().max() < 1e-6


class EngineAttention:
    """Takes calls as megatron-core's attention on Transformer Engine does, and notes with which group and lengths it is called."""

    def __init__(self) -> None:
        self.cp_group: Any = ["inner", "outer"]
        self.cp_global_ranks: Any = [0, 1]
        self.cp_stream: Any = "stream"
        self.cp_comm_type = "a2a+p2p"
        self.calls: list[tuple[Any, Any, int]] = []

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str) -> None:
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = cp_group, cp_global_ranks, cp_stream, cp_comm_type

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, attn_mask_type: str, packed_seq_params: Any
    ) -> Tensor:
        assert attention_mask is None and attn_mask_type == "causal"
        self.calls.append((self.cp_group, packed_seq_params and packed_seq_params.cu_seqlens_q.tolist(), len(query)))
        return query.flatten(1)


def test_the_engine_is_called_without_its_group_for_whole_sequences_and_then_with_it() -> None:
    attention, stream = in_parts(EngineAttention)(), stream_with_whole_sequences(1)
    query, key, value = (split_cp_inputs(tensor, stream.sequences, 0, cp_size=2, cp_rank=1) for tensor in heads_of_a_pack())
    output = attention.forward(query, key, value, None, attn_mask_type="causal", packed_seq_params=stream)
    assert torch.equal(output, query.flatten(1)), "both parts, in their order"
    assert attention.calls == [(None, [0, 8, 12, 16], 16), (["inner", "outer"], [0, 48], 24)]
    assert (attention.cp_group, attention.cp_global_ranks, attention.cp_stream) == (["inner", "outer"], [0, 1], "stream")
    cut_alone = PackedStream.of([80])
    attention.forward(query, key, value, None, attn_mask_type="causal", packed_seq_params=cut_alone)
    attention.forward(query, key, value, None, attn_mask_type="causal", packed_seq_params=None)
    assert attention.calls[2:] == [(["inner", "outer"], [0, 80], 40), (["inner", "outer"], None, 40)]
