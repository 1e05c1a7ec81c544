"""Qwen3-Omni's thinker on a GPU at a cut-down depth of the 30B-A3B shape, by the rule of bfloat16; sound and sound in videos included."""

from __future__ import annotations

from collections.abc import Iterator
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

MIXES = ("text", "document", "audio", "audio_and_image", "audio_in_video", "everything", "long_audio")
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_random_folder("qwen3_omni_30b_a3b", tmp_path_factory.mktemp("gpu") / "omni", num_layers=NUM_LAYERS)
    yield folder
    remove(folder)


@pytest.fixture(scope="module")
def float32(folder: Path) -> Outcome:
    return run_transformers(folder, MIXES, torch.float32)


@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_engine)])
def test_errors_are_those_of_bfloat16(folder: Path, float32: Outcome, backend: Any) -> None:
    theirs = error(run_transformers(folder, MIXES, torch.bfloat16), float32)
    ours = error(run_ours(folder, MIXES, backend, backward=False), float32)
    print(f"\n{backend}: mean error {ours:.5f}, transformers in bfloat16 {theirs:.5f}")
    assert ours <= ERROR_RATIO * theirs


def test_float32_equals_transformers(folder: Path, float32: Outcome) -> None:
    ours = run_ours(folder, MIXES, "torch", torch.float32)
    assert (ours.logprobs - float32.logprobs).abs().max() < 1e-3
    assert disagreeing(gradient_agreement(ours.gradients, float32.gradients)) == {}
