"""The model under context parallelism against `transformers` one row at a time, and layouts against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftcp.models.tiny import write_tiny
from tests.distributed.model_harness import Result, Row, gradient_excess, run_ours, run_transformers
from tests.distributed.ranks import RankPool

LOGPROB_TOLERANCE = 1e-5
"""Absolute, natural log, float32."""
LOSS_TOLERANCE = 1e-5
"""Relative, of the loss sum."""
GRADIENT_TOLERANCE = 1e-5
"""Relative to the largest entry of the gradient, or to 1e-3 of the largest of all."""

MIXED = (Row("image"), Row("text"), Row("three_images"), Row("video"), Row("image_and_video"))


def check(got: Result, expected: Result) -> None:
    """Log-probabilities, loss, count and every gradient agree."""
    for row, (ours, theirs) in enumerate(zip(got.logprobs, expected.logprobs, strict=True)):
        assert ours.shape == theirs.shape
        if len(ours):
            assert (ours - theirs).abs().max() <= LOGPROB_TOLERANCE, f"log-probabilities of row {row}"
    assert got.num_labels == expected.num_labels
    assert abs(got.loss_sum - expected.loss_sum) <= LOSS_TOLERANCE * max(abs(expected.loss_sum), 1e-3)
    broken = {name: excess for name, excess in gradient_excess(got.gradients, expected.gradients, GRADIENT_TOLERANCE).items() if excess > 1}
    assert not broken


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("mix", ["text", "image", "three_images", "video", "image_and_video"])
def test_one_row_equals_transformers(ranks: RankPool, tiny_qwen3_vl: Path, mix: str, cp_size: int) -> None:
    rows = (Row(mix),)
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, num_ranks=cp_size):
        check(result, expected)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_mixed_batch_equals_transformers(ranks: RankPool, tiny_qwen3_vl: Path, packing: bool, cp_size: int) -> None:
    expected = ranks.run(run_transformers, tiny_qwen3_vl, MIXED, num_ranks=1)[0]
    for microbatches in (1, 2):
        for result in ranks.run(run_ours, tiny_qwen3_vl, MIXED, cp_size, packing, microbatches, num_ranks=cp_size):
            check(result, expected)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_case_26_layouts_equal_each_other(ranks: RankPool, tiny_qwen3_vl: Path, packing: bool) -> None:
    one_rank = ranks.run(run_ours, tiny_qwen3_vl, MIXED, 1, packing, num_ranks=1)[0]
    for cp_size in (2, 4):
        for result in ranks.run(run_ours, tiny_qwen3_vl, MIXED, cp_size, packing, num_ranks=cp_size):
            check(result, one_rank)


def test_a_head_that_is_tied_to_the_embedding(ranks: RankPool, tmp_path: Path) -> None:
    write_tiny("qwen3_vl", tmp_path, tie_word_embeddings=True)
    rows = (Row("image"), Row("text"))
    expected = ranks.run(run_transformers, tmp_path, rows, num_ranks=1)[0]
    assert "lm_head.weight" not in expected.gradients
    for cp_size in (1, 2):
        for result in ranks.run(run_ours, tmp_path, rows, cp_size, num_ranks=cp_size):
            check(result, expected)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_rows_of_1_7_and_8_tokens(ranks: RankPool, tiny_qwen3_vl: Path, packing: bool) -> None:
    rows = (Row("one_token"), Row("seven_tokens"), Row("eight_tokens", labelled=1.0), Row("image"))
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for cp_size in (1, 2, 4):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, packing, num_ranks=cp_size):
            check(result, expected)


def test_case_25_an_image_that_straddles_every_border(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    rows = (Row("big_image", labelled=1.0),)
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for cp_size in (2, 4):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, num_ranks=cp_size):
            check(result, expected)


def test_labels_all_on_one_rank(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """The first quarter of a row lies on rank 0 alone, the middle half on rank 1."""
    for span, holder in (((1, 6), 0), ((10, 20), 1)):
        rows = (Row("text", labelled=1.0, span=span),)
        expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, 2, num_ranks=2):
            check(result, expected)
            assert result.labels_of_ranks[1 - holder] == 0 < result.labels_of_ranks[holder]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_no_label_in_a_microbatch(ranks: RankPool, tiny_qwen3_vl: Path, packing: bool) -> None:
    rows = (Row("image", labelled=0.0), Row("image_and_video"))
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for cp_size in (1, 2):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, packing, 2, num_ranks=cp_size):
            check(result, expected)


def test_no_label_at_all_gives_zero_gradients(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    for result in ranks.run(run_ours, tiny_qwen3_vl, (Row("image", labelled=0.0),), 2, num_ranks=2):
        assert (result.loss_sum, result.num_labels) == (0.0, 0)
        assert all((gradient == 0).all() for gradient in result.gradients.values())


def test_microbatches_of_text_alone_beside_images(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """One micro-batch has no image for any rank; in the other one rank of four has a frame to encode."""
    rows = (Row("text"), Row("eight_tokens"), Row("image"), Row("text"))
    expected = ranks.run(run_transformers, tiny_qwen3_vl, rows, num_ranks=1)[0]
    for cp_size in (1, 2, 4):
        for result in ranks.run(run_ours, tiny_qwen3_vl, rows, cp_size, True, 2, num_ranks=cp_size):
            check(result, expected)


RECOMPUTE = {
    "full_uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "full_block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recomputation_changes_no_gradient(ranks: RankPool, tiny_qwen3_vl: Path, mode: str) -> None:
    expected = ranks.run(run_transformers, tiny_qwen3_vl, MIXED, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_qwen3_vl, MIXED, 2, True, 1, RECOMPUTE[mode], num_ranks=2):
        check(result, expected)
