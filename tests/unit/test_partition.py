"""Which sequences of a pack stay whole on a rank: literal integers for every rank, and what must hold for any lengths."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from swiftcp.parallel.context import local_token_index, split_cp_inputs, stream_order
from swiftcp.parallel.partition import CUT, LEAST_SAVING, CostModel, Partition, PartitionMode, plan_partition, zigzag_partition

COMMUNICATION_ALONE = CostModel(flops_per_second=math.inf, bytes_per_second=1.0, seconds_a_call=0.0)


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def plan(lengths: list[int], num_samples: int, cp_size: int, mode: PartitionMode = "whole") -> Partition | None:
    return plan_partition(ends_of(lengths), num_samples=num_samples, cp_size=cp_size, mode=mode)


LITERAL = {
    # lengths, samples, cp_size -> the global tokens of each rank, and how many of them are of whole sequences
    ((4, 4), 2, 2): ([[0, 1, 2, 3], [4, 5, 6, 7]], 4),
    # Two short ones are whole, the long one is cut: its chunks stand last.
    ((16, 4, 4), 3, 2): ([[16, 17, 18, 19, 0, 1, 2, 3, 12, 13, 14, 15], [20, 21, 22, 23, 4, 5, 6, 7, 8, 9, 10, 11]], 4),
    # The long one equals two short ones, so nothing is cut.
    ((4, 8, 4), 3, 2): ([[4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 12, 13, 14, 15]], 8),
    # Padding makes up for what a rank lacks.
    ((8, 4, 4), 2, 2): ([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]], 8),
    # What padding is left goes to all ranks alike, in pieces of any length.
    ((4, 4, 4), 2, 2): ([[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]], 6),
    # Padding alone.
    ((8,), 0, 4): ([[0, 1], [2, 3], [4, 5], [6, 7]], 2),
    ((16, 8, 8, 8, 8), 5, 4): (
        [[*range(16, 24), 0, 1, 14, 15], [*range(24, 32), 2, 3, 12, 13], [*range(32, 40), 4, 5, 10, 11], [*range(40, 48), 6, 7, 8, 9]],
        8,
    ),
}


@pytest.mark.parametrize(("case", "expected"), LITERAL.items(), ids=str)
def test_each_rank_holds_the_literal_tokens(case: tuple[tuple[int, ...], int, int], expected: tuple[list[list[int]], int]) -> None:
    lengths, num_samples, cp_size = case
    partition = plan(list(lengths), num_samples, cp_size)
    assert partition is not None
    for rank, tokens in enumerate(expected[0]):
        assert split_cp_inputs(torch.arange(sum(lengths)), partition, 0, cp_size=cp_size, cp_rank=rank).tolist() == tokens
        assert sum(partition.lengths(rank)) == expected[1]


def test_one_sequence_or_one_rank_or_zigzag_keeps_none_whole() -> None:
    assert plan([16], 1, 2) is None
    assert plan([8, 4], 2, 2) is None, "neither makes up for the other"
    assert plan([4, 4], 2, 1) is None
    assert plan([4, 4], 2, 2, "zigzag") is None


def test_lengths_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 6 tokens.*2\*CP = 4.*pad it to 8"):
        plan([4, 6, 6], 3, 2)


def random_pack(seed: int, cp_size: int) -> tuple[list[int], int]:
    """Log-uniform lengths, and padding at the end or none."""
    draw = random.Random(seed)
    align = cp_size * draw.choice([2, 16])
    lengths = [align * max(1, int(math.exp(draw.uniform(0, 6)))) for _ in range(draw.randrange(1, 40))]
    padding = draw.choice([0, align * draw.randrange(1, 200)])
    return [*lengths, padding] if padding else lengths, len(lengths)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_any_pack_is_shared_out_evenly_and_never_at_a_higher_cost(cp_size: int) -> None:
    num_kept = 0
    for seed in range(40):
        lengths, num_samples = random_pack(seed, cp_size)
        num_tokens = sum(lengths)
        partition = plan(lengths, num_samples, cp_size)
        if partition is None:
            continue
        num_kept += 1
        local = [local_token_index(partition, num_tokens, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
        assert {len(index) for index in local} == {num_tokens // cp_size}
        assert torch.equal(torch.cat(local).sort().values, torch.arange(num_tokens))
        assert torch.equal(torch.cat(local)[stream_order(partition, num_tokens, cp_size=cp_size)], torch.arange(num_tokens))
        assert all(length % (2 * cp_size) == 0 for length in partition.lengths(CUT))
        assert len({sum(partition.lengths(rank)) for rank in range(cp_size)}) == 1, "whole sequences take as many tokens on every rank"
        assert partition.ends[: num_samples + 1] == tuple(ends_of(lengths)[: num_samples + 1]), "samples are where they were"
        by_default, zigzag = CostModel(), zigzag_partition(ends_of(lengths), cp_size)
        chosen = plan(lengths, num_samples, cp_size, "auto")
        if chosen is None:
            assert by_default.seconds(partition) > (1 - LEAST_SAVING) * by_default.seconds(zigzag)
        else:
            assert chosen == partition and by_default.seconds(chosen) < by_default.seconds(zigzag)
        assert COMMUNICATION_ALONE.seconds(partition) <= COMMUNICATION_ALONE.seconds(zigzag)
    assert num_kept >= 20


def test_costs_are_those_of_the_slowest_rank_and_of_what_it_receives() -> None:
    costs = CostModel(query_width=2, key_width=3, flops_per_second=7.0, bytes_per_second=12.0, seconds_a_call=1000.0)
    partition = Partition((0, 4, 6, 8, 16), (0, 1, 1, CUT), 2)
    # Pairs: 10 on rank 0, 3 + 3 on rank 1; 36 of the sequence that is cut, half a rank. 2 flops x 2 wide, 7 products.
    # Bytes: 8 tokens, half of them from the other rank. Calls: one, and a ring of two.
    assert costs.seconds(partition) == pytest.approx((10 + 18) * 2 * 2 + 3 * 4 + 3 * 1000)
    assert costs.seconds(Partition((0, 4, 8), (0, 1), 2)) == pytest.approx(10 * 2 * 2 + 1000), "nothing is exchanged"


def test_auto_leaves_a_pack_cut_where_whole_sequences_would_make_one_rank_wait() -> None:
    lengths = [8192, *[64] * 128]
    assert plan(lengths, 129, 2) is not None
    assert plan(lengths, 129, 2, "auto") != Partition(tuple(ends_of(lengths)), (0, *[1] * 128), 2)
    assert plan([16384, 4096, 4096, 4096, 4096], 5, 2, "auto") is not None


def test_an_index_is_computed_once_and_sent_with_the_partition() -> None:
    partition = plan([8, 4, 4], 3, 2)
    assert partition is not None
    index = local_token_index(partition, 16, cp_size=2, cp_rank=1)
    assert local_token_index(partition, 16, cp_size=2, cp_rank=1) is index
    sent = partition.map(torch.Tensor.clone)
    assert sent == partition
    found = local_token_index(sent, 16, cp_size=2, cp_rank=1, device=torch.device("cpu"))
    assert torch.equal(found, index) and found is not index
