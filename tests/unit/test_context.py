"""The context-parallel partition, on literal integers for every rank."""

from __future__ import annotations

import pytest
import torch

from swiftcp.parallel.context import local_token_index, split_cp_inputs, stream_order

LITERAL = {
    # cu_seqlens, cp_size -> the global tokens of each rank
    ((0, 4, 12), 2): [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]],
    ((0, 8), 2): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ((0, 8), 4): [[0, 7], [1, 6], [2, 5], [3, 4]],
    ((0, 8, 24), 4): [[0, 7, 8, 9, 22, 23], [1, 6, 10, 11, 20, 21], [2, 5, 12, 13, 18, 19], [3, 4, 14, 15, 16, 17]],
    ((0, 4, 4, 8), 2): [[0, 3, 4, 7], [1, 2, 5, 6]],
    ((0, 6), 3): [[0, 5], [1, 4], [2, 3]],
}


@pytest.mark.parametrize(("case", "expected"), LITERAL.items(), ids=str)
def test_each_rank_holds_the_literal_tokens(case: tuple[tuple[int, ...], int], expected: list[list[int]]) -> None:
    ends, cp_size = case
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    for rank, tokens in enumerate(expected):
        assert split_cp_inputs(torch.arange(ends[-1]), cu_seqlens, 0, cp_size=cp_size, cp_rank=rank).tolist() == tokens
        assert local_token_index(cu_seqlens, ends[-1], cp_size=cp_size, cp_rank=rank).tolist() == tokens


def test_case_24_position_ids_are_cut_on_their_last_dim_like_the_tokens() -> None:
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    tokens_BS = torch.arange(12)[None]
    positions_3BS = torch.stack([tokens_BS, tokens_BS + 100, tokens_BS + 200])
    for rank, expected in enumerate(LITERAL[(0, 4, 12), 2]):
        local = split_cp_inputs(positions_3BS, cu_seqlens, -1, cp_size=2, cp_rank=rank)
        assert local.tolist() == [[[v + shift for v in expected]] for shift in (0, 100, 200)]
        assert split_cp_inputs(tokens_BS, cu_seqlens, -1, cp_size=2, cp_rank=rank).tolist() == [expected]


def test_decoder_inputs_are_cut_on_dim_0() -> None:
    hidden_SBH = torch.arange(8.0)[:, None, None].expand(8, 2, 3)
    local = split_cp_inputs(hidden_SBH, None, 0, cp_size=2, cp_rank=1)
    assert local.shape == (4, 2, 3)
    assert local[:, 0, 0].tolist() == [2, 3, 4, 5]


def test_without_cu_seqlens_the_whole_dim_is_one_sequence() -> None:
    tokens_BS = torch.arange(16).view(2, 8)
    assert split_cp_inputs(tokens_BS, None, -1, cp_size=2, cp_rank=0).tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]


def test_none_stays_none_and_one_rank_keeps_the_object() -> None:
    tensor = torch.arange(5)
    assert split_cp_inputs(None, None, 0, cp_size=2, cp_rank=0) is None
    assert split_cp_inputs(tensor, None, 0, cp_size=1, cp_rank=0) is tensor
    assert split_cp_inputs(tensor, None, 0) is tensor, "without a mesh the group has one rank"


@pytest.mark.parametrize(
    ("ends", "message"), [((0, 4, 10), "sequence 1 has 6 tokens.*2\\*CP = 4.*pad it to 8"), ((0, 4), "runs from 0 to 4.*8 tokens")]
)
def test_lengths_that_do_not_fit_are_named(ends: tuple[int, ...], message: str) -> None:
    num_tokens = 10 if ends[-1] == 10 else 8
    with pytest.raises(ValueError, match=message):
        split_cp_inputs(torch.arange(num_tokens), torch.tensor(ends), -1, cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match="6 tokens"):
        split_cp_inputs(torch.arange(6), None, -1, cp_size=2, cp_rank=0)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_stream_order_undoes_the_partition(cp_size: int) -> None:
    cu_seqlens = torch.tensor([0, 8, 32, 40])
    full = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    local = [split_cp_inputs(full, cu_seqlens, 0, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    order = stream_order(cu_seqlens, 40, cp_size=cp_size)
    assert torch.equal(torch.cat(local)[order], full)


def test_the_gradient_of_the_cut_goes_back_to_its_tokens() -> None:
    full = torch.zeros(8, requires_grad=True)
    split_cp_inputs(full, None, 0, cp_size=2, cp_rank=1).sum().backward()
    assert full.grad.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_an_index_follows_a_change_of_its_lengths() -> None:
    cu_seqlens = torch.tensor([0, 4, 8])
    first = local_token_index(cu_seqlens, 8, cp_size=2, cp_rank=0)
    assert local_token_index(cu_seqlens, 8, cp_size=2, cp_rank=0) is first, "computed once for a pack"
    cu_seqlens[1] = 8
    assert local_token_index(cu_seqlens, 8, cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7]
