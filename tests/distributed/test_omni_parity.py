"""Qwen3-Omni under context parallelism against `transformers` one row at a time, and layouts against one rank: sound included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layout_harness import (
    ONE_RANK,
    WEIGHT_BOUND,
    Layout,
    Result,
    differences,
    measure_layout,
    over_bounds,
    weight_difference,
)
from tests.distributed.model_harness import Row, run_ours, run_transformers
from tests.distributed.ranks import RankPool
from tests.distributed.test_model_parity import RECOMPUTE, check
from tests.distributed.training_harness import Pack

MODALITIES = ("text", "image", "video", "audio", "short_audio", "audio_and_image", "audio_in_video")
MIXED = (Row("audio"), Row("everything"), Row("text"), Row("short_audio"), Row("image_and_video"), Row("audio_and_image"))


@pytest.mark.parametrize("mix", MODALITIES)
def test_one_row_equals_transformers(ranks: RankPool, tiny_omni: Path, mix: str) -> None:
    rows = (Row(mix),)
    expected = ranks.run(run_transformers, tiny_omni, rows, num_ranks=1)[0]
    for cp_size in (1, 2, 4):
        for result in ranks.run(run_ours, tiny_omni, rows, cp_size, num_ranks=cp_size):
            check(result, expected)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_mixed_batch_equals_transformers(ranks: RankPool, tiny_omni: Path, packing: bool) -> None:
    """In two micro-batches: what rows are beside each other changes nothing, also for sounds of less than a second."""
    expected = ranks.run(run_transformers, tiny_omni, MIXED, num_ranks=1)[0]
    for cp_size, microbatches in ((1, 1), (2, 2), (4, 1)):
        for result in ranks.run(run_ours, tiny_omni, MIXED, cp_size, packing, microbatches, num_ranks=cp_size):
            check(result, expected)


def test_ranks_and_microbatches_without_a_modality(ranks: RankPool, tiny_omni: Path) -> None:
    """The first micro-batch has text alone; in the second one rank of four has sound to encode, and one a frame."""
    rows = (Row("text"), Row("eight_tokens"), Row("short_audio"), Row("image"))
    expected = ranks.run(run_transformers, tiny_omni, rows, num_ranks=1)[0]
    for cp_size in (2, 4):
        for result in ranks.run(run_ours, tiny_omni, rows, cp_size, True, 2, num_ranks=cp_size):
            check(result, expected)


def test_recomputation_changes_no_gradient(ranks: RankPool, tiny_omni: Path) -> None:
    rows = (Row("everything"), Row("text"))
    expected = ranks.run(run_transformers, tiny_omni, rows, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_omni, rows, 2, True, 1, RECOMPUTE["full_uniform"], num_ranks=2):
        check(result, expected)


PACKS = (Pack(("everything", "text", "one_token")), Pack(("audio_and_image", "video", "seven_tokens")))
"""Two micro-batches; their lengths divide by no layout's sizes."""

NO_AUXILIARY_LOSS = {"moe_aux_loss_coeff": 0.0}
LAYOUTS = {
    "TP2+SP": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "EP2": Layout(2, {"expert_model_parallel_size": 2}),
    "EP2+CP2": Layout(2, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_omni: Path) -> Result:
    return measure_layout(ranks, tiny_omni, Layout(1, ONE_RANK.keys | NO_AUXILIARY_LOSS), PACKS)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_omni: Path, one_rank: Result) -> None:
    layout = Layout(LAYOUTS[name].num_ranks, LAYOUTS[name].keys | NO_AUXILIARY_LOSS)
    for result in measure_layout(ranks, tiny_omni, layout, PACKS):
        assert over_bounds(differences(result.packed, one_rank.packed)) == over_bounds(differences(result.padded, one_rank.padded)) == {}
        assert weight_difference(result, one_rank) <= WEIGHT_BOUND
