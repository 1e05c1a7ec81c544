"""Qwen3.5, dense and MoE: against `transformers` row by row, layouts against one rank, weights there and back."""

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
from tests.distributed.test_model_parity import check

TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "tiny_qwen3_5": {"TP2": Layout(2, TP2), "TP2+SP+CP2": Layout(4, TP2 | SP | CP2), "PP2+CP2": Layout(4, PP2 | CP2)},
    "tiny_qwen3_5_moe": {
        "EP2": Layout(2, EP2),
        "PP2+EP2+CP2": Layout(4, PP2 | EP2 | CP2),
        "TP2+SP+EP2+CP2, experts cut": Layout(4, TP2 | SP | EP2 | CP2 | {"expert_tensor_parallel_size": 2}),
    },
}

ROWS = (Row("one_token"), Row("image_and_video"), Row("seven_tokens"), Row("300_tokens"), Row("three_images"))
"""Their delta nets and convolutions would see the rows before them if anything leaked."""


@pytest.mark.parametrize(
    ("family", "packing", "cp_size"),
    [
        *(("tiny_qwen3_5", True, cp_size) for cp_size in (1, 2, 4)),
        *(("tiny_qwen3_5", False, cp_size) for cp_size in (1, 4)),
        *(("tiny_qwen3_5_moe", True, cp_size) for cp_size in (1, 4)),
        ("tiny_qwen3_5_moe", False, 2),
    ],
)
def test_a_batch_equals_transformers(ranks: RankPool, family: str, packing: bool, cp_size: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    expected = ranks.run(run_transformers, folder, ROWS, num_ranks=1)[0]
    for result in ranks.run(run_ours, folder, ROWS, cp_size, packing, num_ranks=cp_size):
        check(result, expected)


@pytest.mark.parametrize("family", LAYOUTS)
def test_layouts_give_what_one_rank_gives(ranks: RankPool, family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    expected: Result = measure_layout(ranks, folder, ONE_RANK)[0]
    for name, layout in LAYOUTS[family].items():
        for result in measure_layout(ranks, folder, layout):
            found = [differences(got, of_one) for got, of_one in ((result.packed, expected.packed), (result.padded, expected.padded))]
            print(name, *found, weight_difference(result, expected))
            assert [over_bounds(one) for one in found] == [{}, {}], name
            assert weight_difference(result, expected) <= WEIGHT_BOUND, name
