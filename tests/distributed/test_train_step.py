"""Optimizer steps do not depend on the layout, nor on where labels fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool
from tests.distributed.training_harness import Pack, run_steps

RELATIVE = 1e-5
"""Of losses and gradient norms, between layouts, in float32."""

BATCHES = [
    [Pack(("text", "image")), Pack(("video", "one_token")), Pack(("three_images",)), Pack(("text", "text"))],
    [Pack(("big_image", "seven_tokens")), Pack(("text",), labelled=0.0), Pack(("image_and_video", "text")), Pack(("eight_tokens",))],
    [Pack(("text",)), Pack(("text", "eight_tokens")), Pack(("seven_tokens",)), Pack(("text",))],
    [Pack(("image", "image")), Pack(("text",)), Pack(("image",), labelled=0.1), Pack(("video", "text"))],
]
LAYOUTS = {"cp2": (2, 2), "cp4": (4, 4), "dp2": (1, 2), "cp2_dp2": (2, 4)}
"""Name: (context-parallel size, ranks)."""


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl: Path) -> list[Any]:
    return ranks.run(run_steps, tiny_qwen3_vl, 1, BATCHES, {}, num_ranks=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_those_of_one_rank(layout: str, ranks: RankPool, tiny_qwen3_vl: Path, one_rank: list[Any]) -> None:
    cp_size, num_ranks = LAYOUTS[layout]
    per_rank = ranks.run(run_steps, tiny_qwen3_vl, cp_size, BATCHES, {}, num_ranks=num_ranks)
    assert all(records == per_rank[0] for records in per_rank)
    for got, expected in zip(per_rank[0], one_rank, strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=RELATIVE)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=RELATIVE)
        assert (got.labelled_tokens, got.tokens) == (expected.labelled_tokens, expected.tokens)
