"""Models with experts on a GPU, at a cut-down depth of the 30B-A3B shapes, by the rule of bfloat16; sound and sound in videos included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftcp.parallel.engine import transformer_engine_problem
from tests.gpu.harness import (
    ERROR_RATIO,
    Outcome,
    disagreeing,
    error,
    gradient_agreement,
    remove,
    run_ours,
    run_transformers,
    write_random_folder,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")

MIXES = {
    "qwen3_vl_30b_a3b": ("long_text", "document", "text", "three_images", "image_and_video"),
    "qwen3_omni_30b_a3b": ("text", "document", "audio", "audio_and_image", "audio_in_video", "everything", "long_audio"),
}
NUM_LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A folder, what is read, and what `transformers` makes of it."""

    folder: Path
    mixes: tuple[str, ...]
    float32: Outcome
    bfloat16: Outcome


@pytest.fixture(scope="module", params=MIXES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = write_random_folder(request.param, tmp_path_factory.mktemp("gpu") / request.param, num_layers=NUM_LAYERS)
    mixes = MIXES[request.param]
    yield Case(folder, mixes, *(run_transformers(folder, mixes, dtype) for dtype in (torch.float32, torch.bfloat16)))
    remove(folder)


@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_engine)])
def test_errors_are_those_of_bfloat16(case: Case, backend: Any) -> None:
    """Experts one after the other (torch), and in one grouped product (te)."""
    theirs = error(case.bfloat16, case.float32)
    ours = error(run_ours(case.folder, case.mixes, backend, backward=False), case.float32)
    print(f"\n{case.folder.name}, {backend}: mean error {ours:.5f}, transformers in bfloat16 {theirs:.5f}")
    assert ours <= ERROR_RATIO * theirs


@needs_engine
def test_grouped_experts_give_the_gradients_of_sequential_ones(case: Case) -> None:
    grouped, sequential = (run_ours(case.folder, case.mixes, backend) for backend in ("te", "torch"))
    assert abs(grouped.loss / sequential.loss - 1) < 1e-2
    assert disagreeing(gradient_agreement(grouped.gradients, sequential.gradients)) == {}


def test_float32_equals_transformers(case: Case) -> None:
    ours = run_ours(case.folder, case.mixes, "torch", torch.float32)
    assert (ours.logprobs - case.float32.logprobs).abs().max() < 1e-3
    assert disagreeing(gradient_agreement(ours.gradients, case.float32.gradients)) == {}
