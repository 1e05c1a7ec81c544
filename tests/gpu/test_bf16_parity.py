"""bfloat16 on a GPU at the 2B shape, by one rule: no further from float32 than `transformers` in bfloat16 is, give or take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.harness import Outcome, gradient_agreement, remove, run_ours, run_transformers, write_random_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXES = ("long_text", "document", "text", "long_video", "three_images", "image_and_video")
ERROR_RATIO = 1.5
"""Our mean error of log-probabilities against float32, over that of `transformers` in bfloat16."""
CONTROL_FACTOR = 10
"""A control must miss the tolerance by this much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_random_folder("qwen3_vl_2b", tmp_path_factory.mktemp("gpu") / "qwen3_vl_2b")
    yield folder
    remove(folder)


@pytest.fixture(scope="module")
def float32(folder: Path) -> Outcome:
    return run_transformers(folder, MIXES, torch.float32)


@pytest.fixture(scope="module")
def bfloat16(folder: Path) -> Outcome:
    return run_transformers(folder, MIXES, torch.bfloat16)


def error(outcome: Outcome, reference: Outcome) -> float:
    return (outcome.logprobs - reference.logprobs).abs().mean().item()


@pytest.mark.parametrize("backend", ["torch", "te"])
def test_errors_are_those_of_bfloat16(folder: Path, float32: Outcome, bfloat16: Outcome, backend: str) -> None:
    ours = run_ours(folder, MIXES, backend)
    theirs = error(bfloat16, float32)
    print(f"\n{backend}: mean error {error(ours, float32):.5f}, transformers in bfloat16 {theirs:.5f}")
    agreement = gradient_agreement(ours.gradients, float32.gradients)
    oracle = gradient_agreement(bfloat16.gradients, float32.gradients)
    worst = sorted(agreement, key=lambda name: agreement[name][0])[:5]
    for name in worst:
        ours_to_float32, theirs_to_float32 = agreement[name], oracle[name]
        print(f"  {name}: (cosine, norm) {ours_to_float32}, transformers {theirs_to_float32}")
    assert error(ours, float32) <= ERROR_RATIO * theirs


def test_float32_on_the_gpu_equals_transformers(folder: Path, float32: Outcome) -> None:
    ours = run_ours(folder, MIXES, "torch", torch.float32)
    difference = (ours.logprobs - float32.logprobs).abs().max().item()
    agreement = gradient_agreement(ours.gradients, float32.gradients)
    print(f"\nfloat32: largest difference {difference:.2e}, least cosine {min(c for c, _ in agreement.values()):.7f}")
    assert difference < 1e-2
    assert min(cosine for cosine, _ in agreement.values()) > 0.9999
