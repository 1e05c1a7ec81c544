"""Killed at every point of a save, and at random times: the next start goes on from a whole checkpoint, to the bit."""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from swiftcp.checkpoint.catalog import checkpoints_folder, completed, find_problems
from tests.distributed.checkpoint_harness import Recipe, Record, run

UNTIL = 5
RECIPE = Recipe(save_steps=1, save_total_limit=1)
PRELOAD = [
    "swiftcp.checkpoint.resumable",
    "swiftcp.models.qwen3_vl",
    "swiftcp.trainers.setup",
    "swiftcp.trainers.step",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
]
BESIDE = replace(RECIPE, async_save=True)
FAILPOINTS = [(RECIPE, f"{name}:3") for name in ("shard_written", "marker_written", "published", "latest_written", "pruned")]
FAILPOINTS += [(RECIPE, "shard_written:1"), *((BESIDE, f"{name}:3") for name in ("shard_written", "marker_written", "latest_written"))]


def _train(connection: Connection, folder: Path, output_dir: Path, recipe: Recipe, failpoint: str | None) -> None:
    import torch

    from swiftcp.parallel import cpu_shim

    torch.set_num_threads(1)
    cpu_shim.install()
    os.environ.pop("SWIFTCP_FAILPOINT", None)
    if failpoint is not None:
        os.environ["SWIFTCP_FAILPOINT"] = failpoint
    connection.send(run(folder, output_dir, UNTIL, recipe))


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(
    processes: ForkServerContext, folder: Path, output_dir: Path, recipe: Recipe = RECIPE, failpoint: str | None = None
) -> tuple[ForkServerProcess, Connection]:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_train, args=(theirs, folder, output_dir, recipe, failpoint), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def finish(process: ForkServerProcess, connection: Connection) -> list[Record]:
    records = connection.recv()
    process.join()
    return records


@pytest.fixture(scope="module")
def uninterrupted(processes, tiny_qwen3_vl, tmp_path_factory) -> list[Record]:
    return finish(*start(processes, tiny_qwen3_vl, tmp_path_factory.mktemp("uninterrupted"), Recipe(save_steps=100)))


def assert_whole(output_dir: Path, expect_one: bool) -> None:
    """At the instant of a crash: every folder with a marker is whole, and `latest` names one."""
    assert all(not find_problems(checkpoint) for checkpoint in completed(output_dir))
    assert completed(output_dir) or not expect_one
    latest = checkpoints_folder(output_dir) / "latest"
    if latest.exists():
        assert latest.read_text().strip() in [checkpoint.name for checkpoint in completed(output_dir)]


@pytest.mark.parametrize(("recipe", "failpoint"), FAILPOINTS)
def test_killed_at_a_point_of_the_save_the_next_start_goes_on(processes, tiny_qwen3_vl, tmp_path, uninterrupted, recipe, failpoint):
    process, _ = start(processes, tiny_qwen3_vl, tmp_path, recipe, failpoint=f"checkpoint.{failpoint}")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_whole(tmp_path, expect_one=not failpoint.endswith(":1"))
    records = finish(*start(processes, tiny_qwen3_vl, tmp_path, recipe))
    assert records == uninterrupted[UNTIL - len(records) :]
    assert len(records) in {"shard_written:1": (5,), "shard_written:3": (3,), "marker_written:3": (3,)}.get(failpoint, (2,))
    assert sorted(path.name for path in checkpoints_folder(tmp_path).iterdir()) == ["latest", "step-000005"]


def _is_saving(output_dir: Path, since: float) -> bool:
    try:
        return any(path.stat().st_mtime > since for path in checkpoints_folder(output_dir).glob("*.incomplete"))
    except FileNotFoundError:  # it got its name between the two calls
        return True


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, BESIDE])
def test_killed_at_random_times_of_a_save_the_run_still_ends_as_the_uninterrupted_one(
    processes, tiny_qwen3_vl, tmp_path, uninterrupted, recipe
):
    generator = random.Random(0)
    for _ in range(8):
        had_one = bool(completed(tmp_path))
        begin = time.time()
        process, _ = start(processes, tiny_qwen3_vl, tmp_path, recipe)
        while process.is_alive() and not _is_saving(tmp_path, begin):
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.5))
        process.kill()
        process.join()
        assert_whole(tmp_path, expect_one=had_one)
    records = finish(*start(processes, tiny_qwen3_vl, tmp_path, recipe))
    assert records == uninterrupted[UNTIL - len(records) :]
