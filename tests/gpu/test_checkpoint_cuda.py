"""Saving and resuming on a GPU: the distributed optimizer's shards, bfloat16 weights with float32 masters, CUDA's random states."""

from pathlib import Path

import pytest
import torch

from swiftcp.checkpoint.catalog import completed
from tests.distributed.checkpoint_harness import Recipe, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = {"device": "cuda", "torch_dtype": "bfloat16", "lr": 1e-3}
RECIPES = {
    "distributed_optimizer": {**CUDA, "use_distributed_optimizer": True},
    "plain_optimizer": {**CUDA, "use_distributed_optimizer": False},
    "distributed_optimizer_frozen_tower": {**CUDA, "use_distributed_optimizer": True, "freeze_vit": True},
    "small_moments": {
        **CUDA,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    },
    "torch_attention": {**CUDA, "use_distributed_optimizer": True, "attention_backend": "torch"},
}


@pytest.mark.parametrize(
    ("name", "async_save"), [*((name, False) for name in RECIPES), ("distributed_optimizer", True), ("plain_optimizer", True)]
)
def test_case_34_a_resume_on_a_gpu_is_the_uninterrupted_run(tiny_qwen3_vl, tmp_path, name, async_save):
    """Losses to a tolerance, for backward passes on a GPU add in any order; everything else exactly."""
    recipe = Recipe(values=RECIPES[name], async_save=async_save)
    expected = run(tiny_qwen3_vl, Path("/nonexistent"), 4, Recipe(values=RECIPES[name], save_steps=100))
    first = run(tiny_qwen3_vl, tmp_path, 2, recipe)
    second = run(tiny_qwen3_vl, tmp_path, 4, recipe)
    assert [path.name for path in completed(tmp_path)] == ["step-000002", "step-000004"]
    losses = [[float.fromhex(record.loss) for record in records] for records in ([*first, *second], expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for got, wanted in zip([*first, *second], expected, strict=True):
        assert (got.step, got.learning_rates, got.weight_decays, got.draws) == (
            wanted.step,
            wanted.learning_rates,
            wanted.weight_decays,
            wanted.draws,
        )
