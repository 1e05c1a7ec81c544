"""Layouts over two GPUs in bfloat16 at the 2B shape, by the rule of one GPU: no further from float32 than `transformers` in bfloat16 is.

Two packs of text, images and a video, every layout through the pieces of training itself. Controls show that the rule can fail.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftcp.parallel.engine import transformer_engine_problem
from tests.distributed.layout_harness import LAYOUTS as TINY_LAYOUTS
from tests.distributed.layout_harness import differences, measure
from tests.distributed.ranks import RankPool
from tests.gpu.harness import (
    CONTROL_FACTOR,
    ERROR_RATIO,
    MIXES,
    NORM_TOLERANCE,
    Comparison,
    Outcome,
    compare_on_rank,
    disagreeing,
    error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine"),
]

FLOAT32_BOUND = 5e-5
NUM_PACKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "CP2, p2p": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "CP2, a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "CP2, all_gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "CP2, rows that stay whole": {"context_parallel_size": 2, "cp_partition_mode": "whole"},
    "CP2, a2a, rows that stay whole": {"context_parallel_size": 2, "cp_partition_mode": "whole", "cp_comm_type": "a2a"},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP2, distributed optimizer": {"use_distributed_optimizer": True},
    "CP2, distributed optimizer": {"context_parallel_size": 2, "use_distributed_optimizer": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, 2 chunks": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


def compare(ranks: RankPool, folder: Path, keys: dict[str, Any], *, fault: str | None = None, gradients: Path | None = None) -> Comparison:
    return ranks.run(compare_on_rank, folder, MIXES, keys, fault, gradients, NUM_PACKS, num_ranks=2)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_errors_of_bfloat16(
    gpu_ranks: RankPool, folder: Path, float32: Outcome, bfloat16: Outcome, float32_gradients: Path, name: str
) -> None:
    found = compare(gpu_ranks, folder, LAYOUTS[name], gradients=float32_gradients)
    ours, theirs = error(found, float32), error(bfloat16, float32)
    cosine = min(cosine for cosine, _ in found.agreement.values())
    norms = max((abs(norm - 1) for _, norm in found.agreement.values()))
    print(
        f"\n| {name} | {ours:.5f} ({theirs:.5f}) | {found.loss / float32.loss - 1:+.1e} | "
        f"{found.grad_norm / float32.grad_norm - 1:+.1e} | {cosine:.5f} | {norms:.4f} |"
    )
    assert ours <= ERROR_RATIO * theirs
    assert abs(found.loss - float32.loss) <= ERROR_RATIO * theirs
    assert abs(found.grad_norm / float32.grad_norm - 1) <= NORM_TOLERANCE
    assert found.agreement.keys() == float32.gradients.keys()
    assert not disagreeing(found.agreement)


@pytest.mark.parametrize("name", [name for name, layout in TINY_LAYOUTS.items() if layout.num_ranks == 2])
def test_a_layout_in_float32_is_one_gpu(gpu_ranks: RankPool, tiny_qwen3_vl: Path, name: str) -> None:
    """The tiny model with PyTorch's core attention, packed and padded, over NCCL."""
    keys = {"device": "cuda", "torch_dtype": "float32", "attention_backend": "torch"}
    one = gpu_ranks.run(measure, tiny_qwen3_vl, keys, num_ranks=1)[0]
    two = gpu_ranks.run(measure, tiny_qwen3_vl, TINY_LAYOUTS[name].keys | keys, num_ranks=2)[0]
    for got, expected in ((two.packed, one.packed), (two.padded, one.padded)):
        found = differences(got, expected)
        assert max(found.loss, found.grad_norm, found.gradient, found.logprob) < FLOAT32_BOUND, found


@pytest.mark.parametrize("fault", ["contiguous_partition", "wrong_half_of_the_partition", "labels_shifted_after_the_cut"])
def test_a_fault_of_the_partition_shows(gpu_ranks: RankPool, folder: Path, float32: Outcome, bfloat16: Outcome, fault: str) -> None:
    """By the largest error, for labels that are shifted late only touch the tokens at the borders of chunks."""

    def largest(outcome: Outcome | Comparison) -> float:
        return (outcome.logprobs - float32.logprobs).abs().max().item()

    found, theirs = largest(compare(gpu_ranks, folder, LAYOUTS["CP2, p2p"], fault=fault)), largest(bfloat16)
    print(f"\n{fault}: largest error {found:.4f}, transformers in bfloat16 {theirs:.4f}")
    assert found - theirs > CONTROL_FACTOR * (ERROR_RATIO - 1) * theirs


def test_a_tower_whose_gradients_are_not_summed_shows(gpu_ranks: RankPool, folder: Path, float32_gradients: Path) -> None:
    found = compare(gpu_ranks, folder, LAYOUTS["CP2, p2p"], fault="tower_gradients_not_summed", gradients=float32_gradients)
    wrong = disagreeing(found.agreement)
    moved = max(abs(math.log(norm)) for name, (_, norm) in wrong.items() if name.startswith("model.visual."))
    print(f"\nnot summed: {len(wrong)} gradients are wrong, a norm by a factor of {math.exp(moved):.2f}")
    assert wrong and all(name.startswith("model.visual.") for name in wrong)
    assert moved > CONTROL_FACTOR * NORM_TOLERANCE
