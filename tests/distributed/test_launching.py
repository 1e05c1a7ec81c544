"""Two nodes on one machine, each with a launcher of its own: the same losses as one launcher, whatever describes the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftcp.launch import LOOPBACK, SWIFTCP, base_environment, free_port
from tests import slurm_stubs
from tests.distributed.loop_harness import logged, run_sft
from tests.distributed.ranks import RankPool
from tests.training_rows import write_rows

SECONDS = 300
RELATIVE = 1e-5
"""Of losses, between layouts, in float32."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rows = write_rows(tmp_path_factory.mktemp("rows"), 12)
    values = {"model": tiny_qwen3_vl, "dataset": rows, "max_length": 192, "global_batch_size": 2, "train_iters": 2, "lr": 1e-3}
    return {**values, "save_safetensors": False, "device": "cpu"}


@pytest.fixture(scope="module")
def expected(ranks: RankPool, recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank."""
    output_dir = tmp_path_factory.mktemp("one")
    values = {**recipe, "model": str(recipe["model"]), "dataset": [str(recipe["dataset"])], "output_dir": str(output_dir)}
    assert ranks.run(run_sft, values, num_ranks=1) == ["done"]
    return [one["loss"] for one in logged(output_dir)]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test started; what is left is killed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start_nodes(
    processes: list[subprocess.Popen[str]], commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]
) -> list[str]:
    """Run a command for each node with its variables; all must end with 0. Returns what each printed."""
    environment = base_environment(os.environ, 2)
    for command, its_variables in zip(commands, variables, strict=True):
        processes.append(
            subprocess.Popen(command, env=environment | dict(its_variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs


def options(recipe: dict[str, Any], **more: Any) -> list[str]:
    return ["sft", *(f"--{key}={value}" for key, value in {**recipe, **more}.items())]


def test_two_launchers_described_by_variables(processes, recipe, expected, tmp_path):
    port = str(free_port())
    variables = [{"NNODES": "2", "NODE_RANK": rank, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "NPROC_PER_NODE": "2"} for rank in "01"]
    command = [*SWIFTCP, *options(recipe, output_dir=tmp_path, context_parallel_size=2)]
    first, second = start_nodes(processes, [command] * 2, variables)
    assert [one["loss"] for one in logged(tmp_path)] == pytest.approx(expected, rel=RELATIVE)
    assert "ranks from swiftcp: 2 nodes x 2" in first and "world 4 = " in first and "step 2/2" in first
    assert "step 2/2" not in second


def test_two_torchruns(processes, recipe, expected, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--master_addr={LOOPBACK}"]
    torchrun.append(f"--master_port={free_port()}")
    command = ["-m", "swiftcp", *options(recipe, output_dir=tmp_path, context_parallel_size=2)]
    first, second = start_nodes(processes, [[*torchrun, f"--node_rank={rank}", *command] for rank in range(2)], [{}, {}])
    assert [one["loss"] for one in logged(tmp_path)] == pytest.approx(expected, rel=RELATIVE)
    assert "ranks from torchrun: 2 nodes x 1" in first and "step 2/2" not in second


def test_a_slurm_job_of_two_nodes(processes, recipe, expected, tmp_path):
    """The script of `swiftcp slurm`, run by bash, with an srun that starts its tasks here."""
    values = {**recipe, "output_dir": tmp_path / "the run", "context_parallel_size": 2}
    (tmp_path / "my recipe.yaml").write_text(
        "".join(f"{key}: {str(value).lower() if value is False else value}\n" for key, value in values.items())
    )
    environment = base_environment(os.environ, 2)
    command = [*SWIFTCP, "slurm", "my recipe.yaml", "--nodes=2", "--gpus_per_node=1"]
    script = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    job = slurm_stubs.start(script, slurm_stubs.install(tmp_path / "bin", environment, num_nodes=2), tmp_path)
    processes.append(job)
    output, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, output
    assert [one["loss"] for one in logged(tmp_path / "the run")] == pytest.approx(expected, rel=RELATIVE)
    assert "ranks from SLURM: 2 nodes x 1, meeting at localhost:16242" in output
