"""Qwen3-Omni under context parallelism against `transformers` one row at a time, and layouts against one rank: sound included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import model_harness
from tests.distributed.layout_harness import (
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

ROWS = (
    *(Row("audio"), Row("everything"), Row("text"), Row("short_audio"), Row("image")),
    *(Row("image_and_video"), Row("audio_in_video"), Row("video"), Row("audio_and_image")),
)
"""Every mix of modalities; sound inside of videos too."""


@pytest.fixture(scope="module")
def theirs(ranks: RankPool, tiny_omni: Path) -> model_harness.Result:
    return ranks.run(run_transformers, tiny_omni, ROWS, num_ranks=1)[0]


@pytest.mark.parametrize(
    ("cp_size", "packing", "microbatches"),
    [(1, True, len(ROWS)), (1, False, 2), (2, True, 2), (2, False, 3), (4, True, 1), (4, True, len(ROWS))],
    ids=["CP1, row by row", "CP1, padded", "CP2, packed", "CP2, padded", "CP4, packed", "CP4, row by row"],
)
def test_rows_equal_transformers(
    ranks: RankPool, tiny_omni: Path, theirs: model_harness.Result, cp_size: int, packing: bool, microbatches: int
) -> None:
    """What rows are beside each other changes nothing, also for sounds of less than a second."""
    for result in ranks.run(run_ours, tiny_omni, ROWS, cp_size, packing, microbatches, num_ranks=cp_size):
        check(result, theirs)


def test_ranks_and_microbatches_without_a_modality(ranks: RankPool, tiny_omni: Path) -> None:
    """The first micro-batch has text alone; in the second one rank of four has sound to encode, and one a frame."""
    rows = (Row("text"), Row("eight_tokens"), Row("short_audio"), Row("image"))
    expected = ranks.run(run_transformers, tiny_omni, rows, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_omni, rows, 4, True, 2, num_ranks=4):
        check(result, expected)


def test_recomputation_changes_no_gradient(ranks: RankPool, tiny_omni: Path) -> None:
    rows = (Row("everything"), Row("text"))
    expected = ranks.run(run_transformers, tiny_omni, rows, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_omni, rows, 2, True, 1, RECOMPUTE["full_uniform"], num_ranks=2):
        check(result, expected)


PACKS = (Pack(("everything", "text", "one_token")), Pack(("audio_and_image", "video", "seven_tokens")))
"""Two micro-batches; their lengths divide by no layout's sizes."""

ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.02}
LAYOUTS = {
    "TP2+SP": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "EP2": Layout(2, {"expert_model_parallel_size": 2}),
    "EP2+CP2": Layout(2, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_omni: Path) -> Result:
    return measure_layout(ranks, tiny_omni, Layout(1, ROUTER_LOSSES), PACKS)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_omni: Path, one_rank: Result) -> None:
    layout = Layout(LAYOUTS[name].num_ranks, LAYOUTS[name].keys | ROUTER_LOSSES)
    for result in measure_layout(ranks, tiny_omni, layout, PACKS):
        assert over_bounds(differences(result.packed, one_rank.packed)) == over_bounds(differences(result.padded, one_rank.padded)) == {}
        assert result.packed.router_losses == pytest.approx(one_rank.packed.router_losses, rel=1e-5)
        assert weight_difference(result, one_rank) <= WEIGHT_BOUND
