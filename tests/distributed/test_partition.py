"""Packs in which some sequences stay whole on a rank: what `transformers` and the zigzag partition give, one and all."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from swiftcp.parallel.partition import CUT, Partition, plan_partition
from tests.distributed.model_harness import PACK_ALIGN, Row, collate, run_ours, run_transformers, samples_of
from tests.distributed.ranks import RankPool
from tests.distributed.test_model_parity import RECOMPUTE, check

PADDED = 16
"""Tokens of padding behind a pack's rows."""
BIG_IMAGE_CUT = (
    Row("big_image", labelled=1.0),
    Row("eight_tokens", labelled=1.0),
    Row("one_token"),
    Row("eight_tokens", labelled=1.0),
    Row("seven_tokens"),
)
"""An image that straddles every border of chunks, beside rows that stay whole on each of two or four ranks."""
MEDIA_ON_EACH_RANK = (Row("image_and_video"), Row("big_image"), Row("image"), Row("text"), Row("eight_tokens"), Row("three_images"))


def partition_of(folder: Path, rows: tuple[Row, ...], cp_size: int, total_length: int | None = None) -> Partition | None:
    (batch,) = collate(samples_of(folder, rows), True, 1, total_length)
    return plan_partition(batch.cu_seqlens.tolist(), num_samples=len(rows), cp_size=cp_size, mode="whole")


@pytest.mark.parametrize("cp_size", [2, 4])
def test_rows_that_stay_whole_beside_an_image_that_is_cut(ranks: RankPool, tiny_qwen3_vl: Path, cp_size: int) -> None:
    rows = BIG_IMAGE_CUT
    partition = partition_of(tiny_qwen3_vl, rows, cp_size)
    assert partition is not None and partition.owners[0] == CUT and CUT not in partition.owners[1:]
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    zigzag = ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, num_ranks=cp_size)[0]
    for recompute in (None, RECOMPUTE["full_uniform"]):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, True, 1, recompute, "whole", num_ranks=cp_size):
            check(result, expected)
            check(result, zigzag)
            assert result.labels_of_ranks != zigzag.labels_of_ranks, "the ranks hold other tokens"


def test_rows_with_media_that_stay_whole_beside_padding(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Nothing is cut, or little is: in packs with padding, which makes up for what a rank lacks, and without."""
    rows = MEDIA_ON_EACH_RANK
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    num_tokens = sum(-(-len(sample) // PACK_ALIGN) * PACK_ALIGN for sample in samples_of(tiny_qwen3_vl, rows))
    for total_length in (num_tokens, num_tokens + PADDED):
        partition = partition_of(tiny_qwen3_vl, rows, 2, total_length)
        assert partition is not None and (CUT in partition.owners) == (total_length == num_tokens)
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, 2, True, 1, None, "whole", total_length, num_ranks=2):
            check(result, expected)


def test_micro_batches_of_either_partition(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Of two packs in a step one keeps its rows whole, and the other cannot; padded rows are always cut."""
    rows = (Row("image"), Row("text"), Row("video"), Row("seven_tokens"))
    whole = [partition_of(tiny_qwen3_vl, half, 2) is not None for half in itertools.batched(rows, 2)]
    assert whole == [True, False]
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for packing in (True, False):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, 2, packing, 2, None, "whole", num_ranks=2):
            check(result, expected)
