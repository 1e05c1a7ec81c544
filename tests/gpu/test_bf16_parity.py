"""bfloat16 on a GPU at the 2B shape, by one rule: no further from float32 than `transformers` in bfloat16 is, give or take.

Controls show that the rule can fail: a fault moves the figure by ten times what the rule leaves beyond the error of `transformers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftcp.parallel.engine import transformer_engine_problem
from tests.distributed.parity_faults import FAULTS
from tests.gpu.harness import (
    CONTROL_FACTOR,
    ERROR_RATIO,
    MIXES,
    Outcome,
    disagreeing,
    error,
    gradient_agreement,
    run_ours,
    samples_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")
BACKENDS = ["torch", pytest.param("te", marks=needs_engine)]


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
    assert not disagreeing(agreement)


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
