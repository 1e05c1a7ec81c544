"""`swiftcp parity` holds on images and a video under context and tensor parallelism, and finds each of six faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftcp.config import Machine, ParityConfig, resolve, validate
from swiftcp.trainers import parity
from tests.distributed.parity_faults import FAULTS, run_stage
from tests.distributed.ranks import RankPool
from tests.media_rows import write_media_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_rows(tmp_path_factory.mktemp("rows"))


def options(model: Path, rows: Path) -> list[str]:
    return ["--model", str(model), "--dataset", str(rows), "--context_parallel_size", "2", "--packing_length", "1024", "--device", "cpu"]


def exit_code(ranks: RankPool, arguments: list[str], fault: str | None, num_ranks: int = 2) -> int:
    """Of the command, with its stages on a pool of ranks."""

    def start(task: dict[str, Any], num_ranks: int) -> int:
        ranks.run(run_stage, task, fault, num_ranks=num_ranks)
        return 0

    resolved = validate(resolve(ParityConfig, arguments), Machine(num_ranks, num_ranks, 0))
    return parity.run(resolved, start=start)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_the_table(ranks: RankPool, tiny_qwen3_vl: Path, rows: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    every_row_cut = ["--cp_partition_mode", "zigzag"]
    assert exit_code(ranks, [*options(tiny_qwen3_vl, rows), *every_row_cut], fault) == 1
    assert "parity is BROKEN" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [[], ["--packing", "false", "--micro_batch_size", "3"], ["--nproc_per_node", "4"], ["--pipeline_model_parallel_size", "2"]],
    ids=["packed", "padded", "dp2", "pp2"],
)
def test_without_a_fault_it_holds(
    ranks: RankPool, tiny_qwen3_vl: Path, rows: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    num_ranks = 4 if more[:1] in (["--nproc_per_node"], ["--pipeline_model_parallel_size"]) else 2
    assert exit_code(ranks, [*options(tiny_qwen3_vl, rows), *more], None, num_ranks) == 0
    table = capsys.readouterr().out
    assert "parity holds" in table and "FAILED" not in table


SEQUENCE_PARALLEL = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]


@pytest.mark.parametrize("fault", [None, "deepstack_sliced"])
def test_sequence_parallelism_with_context_parallelism(
    ranks: RankPool, tiny_qwen3_vl: Path, rows: Path, fault: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(ranks, [*options(tiny_qwen3_vl, rows), *SEQUENCE_PARALLEL], fault, num_ranks=4) == (1 if fault else 0)
    table = capsys.readouterr().out
    assert "world 4 = tp 2 x pp 1 x cp 2 x dp 1" in table
    broken = [line for line in table.splitlines() if "FAILED" in line]
    if fault:  # the loss is right: the tower's gradients alone are wrong
        assert broken and all("gradient" in line for line in broken) and "model.visual." in table


def test_tensor_parallelism_whose_head_keeps_its_own_part_of_the_gradient(ranks: RankPool, tiny_qwen3_vl: Path, rows: Path) -> None:
    arguments = [*options(tiny_qwen3_vl, rows), "--tensor_model_parallel_size", "2"]
    assert exit_code(ranks, arguments, "head_gradient_not_summed", num_ranks=4) == 1


@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tiny_qwen3_vl: Path, rows: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "swiftcp", "parity", *options(tiny_qwen3_vl, rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity holds" in done.stdout and "world 2 = cp 2 x dp 1" in done.stdout
