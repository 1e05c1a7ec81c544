"""`swiftcp sft` as users start it, with its processes: SIGTERM to all of them, an error on a rank, a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from swiftcp.launch import SWIFTCP, base_environment
from tests.distributed.loop_harness import logged
from tests.training_rows import write_rows

SECONDS_TO_START = 300
SECONDS_TO_END = 60

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Started:
    """A run and the file that its output goes to."""

    process: subprocess.Popen[bytes]
    output_file: Path

    def output(self) -> str:
        return self.output_file.read_text()

    def end(self, timeout: float) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout)

    def wait_for_step(self, log: Path, step: int) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not log.exists() or log.read_text().count("\n") < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.2)


Start = Callable[..., Started]


def session_members(session: int) -> list[int]:
    """Processes of a session, zombies left out."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        state, _, _, its_session = rest.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state != "Z":
            members.append(int(pid))
    return members


@pytest.fixture
def start(tiny_qwen3_vl: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a run over tmp_path/rows into tmp_path/run, in a session of its own; what is left of it is killed in the end."""
    rows = write_rows(tmp_path / "rows", 20)
    started: list[Started] = []

    def run(*options: str) -> Started:
        given = {"model": tiny_qwen3_vl, "dataset": rows, "output_dir": tmp_path / "run", "max_length": 192, "global_batch_size": 2}
        given |= {"context_parallel_size": 2, "device": "cpu"}
        command = [*SWIFTCP, "sft", *(f"--{key}={value}" for key, value in given.items()), *options]
        output_file = tmp_path / f"output-{len(started)}.txt"
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                command, env=base_environment(os.environ, 2), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        started.append(Started(process, output_file))
        return started[-1]

    yield run
    for one in started:
        for pid in session_members(one.process.pid):
            os.kill(pid, signal.SIGKILL)
        one.process.wait()


def test_sigterm_to_every_process_saves_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    run = start("--train_iters=5000", "--dataloader_num_workers=1")
    run.wait_for_step(tmp_path / "run" / "logging.jsonl", 2)
    for pid in session_members(run.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.end(SECONDS_TO_END) == 75, run.output()
    assert session_members(run.process.pid) == []
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert saved == logged(tmp_path / "run")[-1]["iteration"] and f"saved step {saved} of 5000" in run.output()

    run = start(f"--train_iters={saved + 2}")
    assert run.end(SECONDS_TO_START) == 0, run.output()
    assert [one["iteration"] for one in logged(tmp_path / "run")] == list(range(1, saved + 3))
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    assert "the new one is followed" in run.output()  # a changed train_iters changes the schedule


def test_an_error_on_a_rank_ends_all_and_names_the_row(start: Start, tmp_path: Path) -> None:
    run = start("--train_iters=5000", "--dataloader_num_workers=0")
    run.wait_for_step(tmp_path / "run" / "logging.jsonl", 2)
    for image in (tmp_path / "rows").glob("*.png"):
        image.unlink()
    assert run.end(SECONDS_TO_END) == 1, run.output()
    assert "error: rank " in run.output() and f"{tmp_path / 'rows' / 'rows.jsonl'}:" in run.output()
    assert session_members(run.process.pid) == []


def test_a_rank_that_is_killed_is_named_and_no_innocent_row(start: Start, tmp_path: Path) -> None:
    run = start("--train_iters=5000", "--dataloader_num_workers=0")
    run.wait_for_step(tmp_path / "run" / "logging.jsonl", 2)
    [victim] = [pid for pid in session_members(run.process.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    assert run.end(SECONDS_TO_END) == 128 + signal.SIGKILL, run.output()
    after = run.output().rpartition("step ")[2].splitlines()[1:]
    assert after[0].startswith("swiftcp: rank 1 was killed by SIGKILL") and "data set rows" not in run.output(), run.output()
    assert session_members(run.process.pid) == []
