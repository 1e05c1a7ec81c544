"""What the tests at the 2B shape share: the checkpoint, what `transformers` makes of it, and one process a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import RankPool
from tests.gpu.harness import MIXES, Outcome, remove, run_transformers, write_random_folder


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_random_folder("qwen3_vl_2b", tmp_path_factory.mktemp("gpu") / "qwen3_vl_2b")
    yield folder
    remove(folder)


@pytest.fixture(scope="package")
def float32(folder: Path) -> Outcome:
    return run_transformers(folder, MIXES, torch.float32)


@pytest.fixture(scope="package")
def bfloat16(folder: Path) -> Outcome:
    return run_transformers(folder, MIXES, torch.bfloat16)


@pytest.fixture(scope="package")
def float32_gradients(folder: Path, float32: Outcome) -> Path:
    """The file of those gradients, for rank processes."""
    file = folder / "gradients.pt"
    torch.save({name: gradient.cpu() for name, gradient in float32.gradients.items()}, file)
    return file


@pytest.fixture(scope="package")
def gpu_ranks() -> Iterator[RankPool]:
    """A process for each of two GPUs."""
    pool = RankPool(2, "cuda")
    yield pool
    pool.stop()
