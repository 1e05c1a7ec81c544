"""Micro-batches of the full stream: shifted inside each sample, padded to steps, media where they belong."""

from __future__ import annotations

import pytest
import torch

from swiftcp.data.batch import IGNORED_LABEL, Batch, Sample, VisualItems, collate_pack, collate_rows

PAD = 99
NONE = IGNORED_LABEL


def sample(row: int, ids: list[int], labels: list[int] | None = None, visual: VisualItems | None = None) -> Sample:
    """Positions count up, weights are the row's number plus 1."""
    length = len(ids)
    return Sample(
        row,
        torch.tensor(ids),
        torch.tensor(ids if labels is None else labels),
        torch.full((length,), row + 1.0),
        torch.arange(length).expand(3, -1),
        visual,
    )


def items(num_patches: int, positions: list[int]) -> VisualItems:
    return VisualItems(torch.full((num_patches, 6), float(num_patches)), torch.tensor([[1, 2, num_patches // 2]]), torch.tensor(positions))


def test_case_20_labels_are_shifted_inside_each_sample() -> None:
    batch = collate_pack([sample(0, [1, 2, 3]), sample(1, [4, 5, 6, 7])], pack_align=1, pad_token_id=PAD)
    assert batch.labels_BS.tolist() == [[2, 3, NONE, 5, 6, 7, NONE]]
    assert (batch.labels_BS != NONE).sum() == 5
    assert batch.weights_BS.tolist() == [[1, 1, 0, 2, 2, 2, 0]]


def test_pack_literally() -> None:
    batch = collate_pack([sample(7, [1, 2, 3]), sample(4, [5] * 5)], pack_align=4, pad_token_id=PAD)
    assert batch.packed and batch.rows == (7, 4) and batch.lengths == (3, 5)
    assert batch.input_ids_BS.tolist() == [[1, 2, 3, PAD, 5, 5, 5, 5, 5, PAD, PAD, PAD]]
    assert batch.padding_mask_BS.tolist() == [[False] * 3 + [True] + [False] * 5 + [True] * 3]
    assert batch.position_ids_3BS[0].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 4, 12] and batch.max_seqlen == 8


def test_pack_of_full_length() -> None:
    batch = collate_pack([sample(0, [1, 2, 3])], pack_align=4, pad_token_id=PAD, total_length=12)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 4, 12]
    assert batch.max_seqlen == 8 and batch.input_ids_BS.shape == (1, 12) and batch.rows == (0,)


def test_what_the_layout_needs_beyond_pack_align_is_padded_at_the_end() -> None:
    batch = collate_pack([sample(0, [1] * 5), sample(1, [2])], pack_align=4, pad_token_id=PAD, length_multiple=10)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 8, 12, 20]
    filler = collate_pack([], pack_align=4, pad_token_id=PAD, length_multiple=10)
    assert filler.cu_seqlens is not None and filler.cu_seqlens.tolist() == [0, 20]
    rows = collate_rows([sample(0, [1] * 5), sample(1, [2])], pack_align=4, pad_token_id=PAD, length_multiple=6)
    assert rows.input_ids_BS.shape == (2, 12) and rows.lengths == (5, 1)


@pytest.mark.parametrize("total_length", [4, 10])
def test_pack_that_does_not_fit(total_length: int) -> None:
    with pytest.raises(ValueError, match=f"do not fill {total_length} tokens in steps of 4"):
        collate_pack([sample(0, [1] * 5)], pack_align=4, pad_token_id=PAD, total_length=total_length)


def test_case_22_padding_is_a_mask_and_no_token() -> None:
    batch = collate_pack([sample(0, [0, PAD, 0])], pack_align=4, pad_token_id=0)
    assert batch.padding_mask_BS.tolist() == [[False, False, False, True]]


def test_rows_literally() -> None:
    batch = collate_rows([sample(0, [1, 2, 3]), sample(1, [4, 5, 6, 7, 8])], pack_align=4, pad_token_id=PAD)
    assert not batch.packed and batch.max_seqlen == 8
    assert batch.input_ids_BS.tolist() == [[1, 2, 3] + [PAD] * 5, [4, 5, 6, 7, 8] + [PAD] * 3]
    assert batch.labels_BS.tolist() == [[2, 3] + [NONE] * 6, [5, 6, 7, 8] + [NONE] * 4]
    assert batch.position_ids_3BS.shape == (3, 2, 8)


def test_media_keep_their_order_and_move_with_their_samples() -> None:
    samples = [sample(0, [1] * 5, visual=items(4, [2])), sample(1, [2] * 2), sample(2, [3] * 6, visual=items(8, [4, 1]))]
    packed = collate_pack(samples, pack_align=4, pad_token_id=PAD).visual
    padded = collate_rows(samples, pack_align=4, pad_token_id=PAD).visual
    assert packed is not None and padded is not None
    assert packed.positions_V.tolist() == [2, 12 + 4, 12 + 1]
    assert padded.positions_V.tolist() == [2, 16 + 4, 16 + 1]
    assert packed.grid_thw.tolist() == padded.grid_thw.tolist() == [[1, 2, 2], [1, 2, 4]]
    assert packed.patches_PD[:, 0].tolist() == [4.0] * 4 + [8.0] * 8
    assert collate_pack(samples[1:2], pack_align=4, pad_token_id=PAD).visual is None


def is_filler(batch: Batch) -> bool:
    return bool(batch.padding_mask_BS.all() and (batch.labels_BS == NONE).all() and not batch.weights_BS.any() and batch.rows == ())


def test_case_36_fillers() -> None:
    short, full = (collate_pack([], pack_align=4, pad_token_id=PAD, total_length=total) for total in (None, 12))
    assert is_filler(short) and short.input_ids_BS.tolist() == [[PAD] * 4] and short.max_seqlen == 4
    assert short.cu_seqlens is not None and short.cu_seqlens.tolist() == [0, 4]
    assert is_filler(full) and full.input_ids_BS.shape == (1, 12)
    assert is_filler(collate_rows([], pack_align=4, pad_token_id=PAD))
    rows = collate_rows([], pack_align=4, pad_token_id=PAD, num_rows=3)
    assert is_filler(rows) and rows.input_ids_BS.shape == (3, 4) and rows.lengths == ()


def test_case_36_missing_rows_are_padding() -> None:
    batch = collate_rows([sample(5, [1, 2, 3])], pack_align=4, pad_token_id=PAD, num_rows=2)
    assert batch.rows == (5,) and batch.input_ids_BS.tolist() == [[1, 2, 3, PAD], [PAD] * 4]
    assert batch.padding_mask_BS[1].all() and (batch.labels_BS[1] == NONE).all()
