"""Fixtures of all tests: the pool of ranks and the tiny checkpoint, each made once a session."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool

POOL_SIZE = 4

# Before anything imports torch: tests are small operations in several processes, where more threads only wait for each other; and
# importing torch, megatron-core and transformers without cached byte code takes each process half a minute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The cache of scans is the user's: tests, and the processes that they start, have one of their own.
os.environ["SWIFTCP_CACHE"] = tempfile.mkdtemp(prefix="swiftcp-cache-")
atexit.register(shutil.rmtree, os.environ["SWIFTCP_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four rank processes; `ranks.run(function, ..., num_ranks=n)`."""
    pool = RankPool(POOL_SIZE)
    yield pool
    pool.stop()


def _tiny(tmp_path_factory: pytest.TempPathFactory, family: str, **settings: Any) -> Path:
    from swiftcp.models.tiny import write_tiny

    folder = tmp_path_factory.mktemp("checkpoints") / f"tiny_{family}"
    write_tiny(family, folder, **settings)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-VL checkpoint folder."""
    return _tiny(tmp_path_factory, "qwen3_vl")


@pytest.fixture(scope="session")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny Qwen3-VL of which four chunks can be made, the first with both deepstack levels."""
    return _tiny(tmp_path_factory, "qwen3_vl", num_layers=8, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_qwen3_vl_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-VL-MoE checkpoint folder."""
    return _tiny(tmp_path_factory, "qwen3_vl_moe")


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-Omni checkpoint folder: the whole model."""
    return _tiny(tmp_path_factory, "qwen3_omni_moe")


@pytest.fixture(scope="session")
def tiny_qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3.5 checkpoint folder."""
    return _tiny(tmp_path_factory, "qwen3_5")


@pytest.fixture(scope="session")
def tiny_qwen3_5_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3.5-MoE checkpoint folder."""
    return _tiny(tmp_path_factory, "qwen3_5_moe")
