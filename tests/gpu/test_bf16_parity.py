"""bfloat16 on a GPU at the 2B shape, by one rule: no further from float32 than `transformers` in bfloat16 is, give or take.

Controls show that the rule can fail: a fault moves the figure by ten times what the rule leaves beyond the error of `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftcp.parallel.engine import transformer_engine_problem
from tests.distributed.parity_faults import FAULTS
from tests.gpu.harness import Outcome, gradient_agreement, remove, run_on_ranks, run_ours, run_transformers, samples_of, write_random_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BACKENDS = ["torch", pytest.param("te", marks=needs_engine)]

MIXES = ("long_text", "document", "text", "long_video", "three_images", "image_and_video")
ERROR_RATIO = 1.5
"""Our mean error of log-probabilities against float32, over that of `transformers` in bfloat16."""
CONTROL_FACTOR = 10
"""A fault must move the figure by so many tolerances."""
LEAST_COSINE, NORM_TOLERANCE = 0.999, 0.01
"""Of each tensor's gradient."""


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


@pytest.fixture(scope="module")
def behind_media(folder: Path) -> Tensor:
    """Which log-probabilities are those of text behind an image or a video of its row.

    Those of placeholders all have one target: how far a fault moves them is one draw of a random weight.
    """
    masks = []
    for sample in samples_of(folder, MIXES):
        is_text = torch.ones(len(sample), dtype=torch.bool)
        first = len(sample)
        if sample.visual is not None:
            is_text[sample.visual.positions_V] = False
            first = int(sample.visual.positions_V.min())
        is_text[:first] = False
        masks.append(is_text[1:])
    return torch.cat(masks)


def error(outcome: Outcome, reference: Outcome, where: Tensor | None = None) -> float:
    difference = (outcome.logprobs - reference.logprobs).abs()
    return (difference if where is None else difference[where]).mean().item()


@pytest.mark.parametrize(("backend", "packing"), [("torch", True), *(pytest.param("te", p, marks=needs_engine) for p in (True, False))])
def test_errors_are_those_of_bfloat16(folder: Path, float32: Outcome, bfloat16: Outcome, backend: Any, packing: bool) -> None:
    ours, theirs = error(run_ours(folder, MIXES, backend, packing=packing, backward=False), float32), error(bfloat16, float32)
    print(f"\n{backend}, {'packed' if packing else 'padded'}: mean error {ours:.5f}, transformers in bfloat16 {theirs:.5f}")
    assert ours <= ERROR_RATIO * theirs


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_gradient_is_that_of_float32(folder: Path, float32: Outcome, backend: Any) -> None:
    agreement = gradient_agreement(run_ours(folder, MIXES, backend).gradients, float32.gradients)
    for name in sorted(agreement, key=lambda name: agreement[name][0])[:3]:
        print(f"\n  {backend} {name}: cosine {agreement[name][0]:.5f}, norms {agreement[name][1]:.4f}")
    wrong = {name: found for name, found in agreement.items() if found[0] < LEAST_COSINE or abs(found[1] - 1) > NORM_TOLERANCE}
    assert not wrong


@needs_engine
def test_the_backends_agree(folder: Path, float32: Outcome, bfloat16: Outcome) -> None:
    torch_core, engine = (run_ours(folder, MIXES, backend, backward=False) for backend in ("torch", "te"))
    assert error(torch_core, engine) <= ERROR_RATIO * error(bfloat16, float32)


def test_float32_on_the_gpu_equals_transformers(folder: Path, float32: Outcome) -> None:
    ours = run_ours(folder, MIXES, "torch", torch.float32)
    agreement = gradient_agreement(ours.gradients, float32.gradients)
    print(f"\nfloat32: {(ours.logprobs - float32.logprobs).abs().max():.1e}, {min(cosine for cosine, _ in agreement.values()):.7f}")
    assert (ours.logprobs - float32.logprobs).abs().max() < 1e-3
    assert min(cosine for cosine, _ in agreement.values()) > 0.99999


@pytest.mark.parametrize("fault", ["deepstack_off", "sectioned_mrope"])
def test_a_fault_of_the_model_shows(folder: Path, float32: Outcome, bfloat16: Outcome, behind_media: Tensor, fault: str) -> None:
    with FAULTS[fault]():
        found = error(run_ours(folder, MIXES, "torch", backward=False), float32, behind_media)
    theirs = error(bfloat16, float32, behind_media)
    tolerance = (ERROR_RATIO - 1) * theirs
    print(f"\n{fault}: mean error {found:.4f}, transformers in bfloat16 {theirs:.4f}, tolerance beyond it {tolerance:.4f}")
    assert found - theirs > CONTROL_FACTOR * tolerance


@needs_two_gpus
@needs_engine
def test_two_ranks_have_the_errors_of_one(folder: Path, float32: Outcome, bfloat16: Outcome) -> None:
    found = error(run_on_ranks(folder, MIXES, "te", None), float32)
    print(f"\ntwo ranks: mean error {found:.5f}, transformers in bfloat16 {error(bfloat16, float32):.5f}")
    assert found <= ERROR_RATIO * error(bfloat16, float32)


@needs_two_gpus
@needs_engine
@pytest.mark.parametrize("fault", ["contiguous_partition", "labels_shifted_after_the_cut"])
def test_a_fault_of_context_parallelism_shows(folder: Path, float32: Outcome, bfloat16: Outcome, fault: str) -> None:
    """By the largest error, for labels that are shifted late only touch the tokens at the borders of chunks."""

    def largest(outcome: Outcome) -> float:
        return (outcome.logprobs - float32.logprobs).abs().max().item()

    found, theirs = largest(run_on_ranks(folder, MIXES, "te", fault)), largest(bfloat16)
    print(f"\n{fault}: largest error {found:.4f}, transformers in bfloat16 {theirs:.4f}")
    assert found - theirs > CONTROL_FACTOR * (ERROR_RATIO - 1) * theirs
