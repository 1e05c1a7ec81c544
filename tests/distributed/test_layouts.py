"""Every named layout gives what one rank gives, packed and padded; the table of all differences is printed (`pytest -s`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.layout_harness import (
    CHUNKS,
    EIGHT_LAYERS,
    LAYOUTS,
    ONE_RANK,
    WEIGHT_BOUND,
    Differences,
    Layout,
    Result,
    differences,
    gradients_of_modes,
    head_of_a_vocabulary_shard,
    measure_layout,
    over_bounds,
    table,
    tower_gradients_before_reduction,
    weight_difference,
)
from tests.distributed.model_harness import gradient_excess
from tests.distributed.ranks import RankPool

RELATIVE = 1e-5
"""Of gradients, between layouts, in float32."""


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl: Path) -> Result:
    return measure_layout(ranks, tiny_qwen3_vl, ONE_RANK)[0]


@pytest.fixture(scope="module")
def one_rank_of_eight_layers(ranks: RankPool, eight_layers: Path) -> Result:
    return measure_layout(ranks, eight_layers, ONE_RANK)[0]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Differences]]:
    rows: dict[str, Differences] = {}
    yield rows
    print("\n" + table(rows))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(
    name: str, ranks: RankPool, tiny_qwen3_vl: Path, one_rank: Result, found: dict[str, Differences]
) -> None:
    check_results(measure_layout(ranks, tiny_qwen3_vl, LAYOUTS[name]), one_rank, name, found)


@pytest.mark.parametrize("name", EIGHT_LAYERS)
def test_a_layout_of_eight_layers_with_a_tied_head(
    name: str, ranks: RankPool, eight_layers: Path, one_rank_of_eight_layers: Result, found: dict[str, Differences]
) -> None:
    check_results(measure_layout(ranks, eight_layers, EIGHT_LAYERS[name]), one_rank_of_eight_layers, f"{name}, tied", found)


def check_results(results: Sequence[Result], expected: Result, name: str, found: dict[str, Differences]) -> None:
    for result in results:
        found[f"{name}, packed"] = differences(result.packed, expected.packed)
        found[f"{name}, padded"] = differences(result.padded, expected.padded)
        assert over_bounds(found[f"{name}, packed"]) == over_bounds(found[f"{name}, padded"]) == {}
        assert weight_difference(result, expected) <= WEIGHT_BOUND


@pytest.mark.parametrize("frozen", [("llm",), ("vit", "aligner")], ids=["llm", "tower"])
def test_stages_with_frozen_parts(frozen: tuple[str, ...], ranks: RankPool, eight_layers: Path) -> None:
    """With the language model frozen a later stage has nothing to train, and passes gradients on."""
    keys = {f"freeze_{part}": True for part in frozen}
    [expected] = measure_layout(ranks, eight_layers, Layout(1, keys))
    for result in measure_layout(ranks, eight_layers, Layout(2, {**CHUNKS, **keys})):
        assert over_bounds(differences(result.packed, expected.packed)) == {}
        assert weight_difference(result, expected) <= WEIGHT_BOUND


@pytest.mark.parametrize("name", ["TP2", "TP2+SP"])
def test_tensor_parallel_ranks_with_a_frozen_language_model(name: str, ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Embedding, decoder and head hold parts of matrices that are not trained, and hand whole gradients to the tower."""
    frozen = {"freeze_llm": True}
    [expected] = measure_layout(ranks, tiny_qwen3_vl, Layout(1, frozen))
    for result in measure_layout(ranks, tiny_qwen3_vl, Layout(2, LAYOUTS[name].keys | frozen)):
        assert over_bounds(differences(result.packed, expected.packed)) == {}
        assert weight_difference(result, expected) <= WEIGHT_BOUND


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {name: value for name, value in gradient_excess(got, expected, RELATIVE).items() if not value <= 1} == {}


@pytest.mark.parametrize("name", ["TP2", "TP2+SP"])
def test_tower_gradients_are_whole_and_equal_on_every_tensor_parallel_rank(name: str, ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Before anything is reduced over ranks."""
    expected = ranks.run(tower_gradients_before_reduction, tiny_qwen3_vl, {}, num_ranks=1)[0]
    first, second = ranks.run(tower_gradients_before_reduction, tiny_qwen3_vl, LAYOUTS[name].keys, num_ranks=2)
    check_gradients(first, expected)
    assert all(torch.equal(first[parameter], second[parameter]) for parameter in expected)


def test_random_weights_a_tied_head_and_a_vocabulary_that_does_not_divide(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """The whole model is drawn, then cut; the rows that fill up the vocabulary take no part."""
    folder = tmp_path / "odd"
    shutil.copytree(tiny_qwen3_vl, folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["vocab_size"] += 1
    described["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(described))
    random = {"init_from_config": True}
    expected = measure_layout(ranks, folder, Layout(1, random))[0]
    assert "lm_head.weight" not in expected.packed.gradients
    for result in measure_layout(ranks, folder, Layout(2, LAYOUTS["TP2+SP"].keys | random)):
        assert over_bounds(differences(result.packed, expected.packed)) == {}
        assert weight_difference(result, expected) <= WEIGHT_BOUND


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_of_the_vocabulary_give_the_losses_and_gradients_of_the_whole(num_ranks: int, ranks: RankPool) -> None:
    for num_tokens in (11, 0):
        for differing in ranks.run(head_of_a_vocabulary_shard, num_tokens, 37, num_ranks=num_ranks):
            assert all(tensor.abs().max() < 1e-5 for tensor in differing if tensor.numel())


RECOMPUTE: list[dict[str, Any]] = [
    dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
    dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
]


@pytest.mark.parametrize("frozen", [{}, {"freeze_vit": True, "freeze_aligner": True}], ids=["nothing", "tower"])
@pytest.mark.parametrize("name", ["TP2", "TP2+SP", "PP2"])
def test_recomputation_leaves_gradients_as_they_are(name: str, frozen: dict[str, bool], ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    [expected] = ranks.run(gradients_of_modes, tiny_qwen3_vl, frozen, [{}], num_ranks=1)[0]
    for results in ranks.run(gradients_of_modes, tiny_qwen3_vl, {**LAYOUTS[name].keys, **frozen}, RECOMPUTE, num_ranks=2):
        for gradients in results:
            check_gradients(gradients, expected)
