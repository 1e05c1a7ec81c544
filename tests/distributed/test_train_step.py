"""Optimizer steps do not depend on the layout, nor on where labels fall."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.model_harness import gradient_excess
from tests.distributed.ranks import RankPool
from tests.distributed.training_harness import (
    Pack,
    broken_micro_batch,
    changed_parameters,
    parameters_by_decay,
    peak_rates,
    run_gradients,
    run_steps,
    step_with_nan_on_rank_1,
)

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


NO_RECOMPUTE: dict[str, Any] = {}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full_uniform": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "full_uniform_3": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3),
    "full_block": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
    "core_attn": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "mlp": dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
}
FROZEN: dict[str, dict[str, bool]] = {
    "nothing": {},
    "tower": dict(freeze_vit=True, freeze_aligner=True),
    "tower_and_llm": dict(freeze_vit=True, freeze_llm=True),
    "llm_and_aligner": dict(freeze_llm=True, freeze_aligner=True),
}
PACKS = [Pack(("image", "text")), Pack(("text", "video"))]


@pytest.mark.parametrize("frozen", FROZEN)
def test_recomputation_leaves_gradients_as_they_are(frozen: str, ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Also where parts are frozen, and in the first layers, which take the deepstack features in."""
    values = dict(**FROZEN[frozen], vit_gradient_checkpointing=False)
    [expected] = ranks.run(run_gradients, tiny_qwen3_vl, 1, PACKS, values, [NO_RECOMPUTE], num_ranks=1)[0]
    values["vit_gradient_checkpointing"] = True
    modes = [NO_RECOMPUTE, *RECOMPUTE.values()]
    results = ranks.run(run_gradients, tiny_qwen3_vl, 1, PACKS, values, modes, num_ranks=1)[0]
    for name, gradients in zip(["tower_alone", *RECOMPUTE], results, strict=True):
        assert gradients.keys() == expected.keys(), name
        for parameter, gradient in gradients.items():
            assert torch.allclose(gradient, expected[parameter], rtol=1e-5, atol=1e-7), f"{name}: {parameter}"
    assert all(gradient.abs().max() > 0 for gradient in expected.values())


@pytest.mark.parametrize("frozen", FROZEN)
def test_recomputation_with_frozen_parts_under_context_parallelism(frozen: str, ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    [expected] = ranks.run(run_gradients, tiny_qwen3_vl, 1, PACKS, FROZEN[frozen], [NO_RECOMPUTE], num_ranks=1)[0]
    modes = [RECOMPUTE["full_uniform"], RECOMPUTE["mlp"]]
    for results in ranks.run(run_gradients, tiny_qwen3_vl, 2, PACKS, FROZEN[frozen], modes, num_ranks=2):
        for gradients in results:
            check_gradients(gradients, expected)


def check_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    excess = gradient_excess(got, expected, RELATIVE)
    assert {name: value for name, value in excess.items() if value > 1} == {}


def test_one_ranks_pack_text_alone(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Of two data-parallel ranks one has images, the other none; every gradient, the tower's too, is that of one rank."""
    packs = [Pack(("image", "three_images")), Pack(("text", "eight_tokens"))]
    [expected] = ranks.run(run_gradients, tiny_qwen3_vl, 1, packs, {}, [NO_RECOMPUTE], num_ranks=1)[0]
    assert expected["visual.patch_embed.proj.weight"].abs().max() > 0
    for num_ranks, cp_size in ((2, 1), (4, 2)):
        for [gradients] in ranks.run(run_gradients, tiny_qwen3_vl, cp_size, packs, {}, [NO_RECOMPUTE], num_ranks=num_ranks):
            check_gradients(gradients, expected)


PARTS = {"freeze_vit": "visual.", "freeze_aligner": ("visual.merger.", "visual.deepstack_merger_list."), "freeze_llm": "language_model."}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts_stay_as_they_are_and_all_others_change(frozen: str, ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    changed = ranks.run(changed_parameters, tiny_qwen3_vl, PACKS, FROZEN[frozen], num_ranks=1)[0]
    for name, has_changed in changed.items():
        part = next(key for key in ("freeze_aligner", "freeze_vit", "freeze_llm") if name.startswith(PARTS[key]))
        assert has_changed != FROZEN[frozen].get(part, False), name


def test_a_global_batch_without_labels_has_no_gradient_and_training_goes_on(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    unlabelled = [Pack(("image",), labelled=0.0), Pack(("text",), labelled=0.0)]
    before, empty, after = ranks.run(run_steps, tiny_qwen3_vl, 1, [PACKS, unlabelled, PACKS], {"weight_decay": 0.0}, num_ranks=2)[0]
    assert (empty.loss, empty.labelled_tokens, empty.grad_norm) == (0.0, 0, 0.0)
    assert math.isfinite(after.loss) and after.loss < before.loss


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    results = ranks.run(step_with_nan_on_rank_1, tiny_qwen3_vl, PACKS, num_ranks=2)
    assert all(unchanged and not schedule_moved for unchanged, schedule_moved, _ in results)
    [[warning], silent] = [warnings for _, _, warnings in results]
    assert warning.endswith("not finite: language_model.decoder.final_layernorm.weight") and silent == []


def test_an_error_names_rank_and_rows(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    [message] = ranks.run(broken_micro_batch, tiny_qwen3_vl, num_ranks=1)
    assert "rank 0" in message and "rows 40, 41" in message and "index" in message


def test_decay_spares_biases_and_norms(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    [decayed, spared] = ranks.run(parameters_by_decay, tiny_qwen3_vl, num_ranks=1)[0]
    assert all(dims > 1 for dims in decayed.values()) and all(dims == 1 for dims in spared.values())
    assert {"visual.pos_embed.weight", "language_model.embedding.word_embeddings.weight"} <= decayed.keys()


def test_parts_have_their_own_learning_rates(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    [rates] = ranks.run(part_rates, tiny_qwen3_vl, num_ranks=1)
    for name, (peak, in_warmup) in rates.items():
        is_aligner = name.startswith(("visual.merger.", "visual.deepstack_merger_list."))
        assert peak == (3e-4 if is_aligner else 1e-5 if name.startswith("visual.") else 1e-3), name
        assert in_warmup == pytest.approx(peak / 2), name
    assert len(set(rates.values())) == 3


def part_rates(folder: Path) -> dict[str, tuple[float, float]]:
    return peak_rates(folder, vit_lr=1e-5, aligner_lr=3e-4)
