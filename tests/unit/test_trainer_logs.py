"""Log records, run files, waiting times, the stop request."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftcp.trainers.logs import LogRecord, RunLog, TimedIterator, utilisation
from swiftcp.trainers.run_files import write_run_files
from swiftcp.trainers.signals import stop_on_sigterm
from swiftcp.trainers.step import Totals
from swiftcp.trainers.trackers import TensorBoard

ONE_RANK: Any = SimpleNamespace(world_size=1, rank=0, device=torch.device("cpu"), describe=lambda: "world 1 = cp 1 x dp 1")


def record(iteration: int, **values: Any) -> LogRecord:
    fixed = dict(
        train_iters=10,
        epoch=0.5,
        loss=1.25,
        grad_norm=0.5,
        lr=1e-5,
        tokens=100,
        labelled_tokens=7,
        pack_fill=0.9,
        tokens_per_second_per_gpu=50.0,
        memory_gib=1.0,
        data_wait_fraction=0.0,
        seconds=2.0,
        elapsed_seconds=4.0,
        remaining_seconds=3725.0,
    )
    return LogRecord(iteration=iteration, **{**fixed, **values})


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def test_one_object_and_one_line_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, writes=True)
    log.write(record(1))
    log.write(record(2, eval_loss=0.75))
    first, second = logged(tmp_path)
    assert first["iteration"] == 1 and first["loss"] == 1.25 and "eval_loss" not in first and "mfu" not in first
    assert second["eval_loss"] == 0.75
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/10 | loss 1.2500") and "1:02:05 left" in lines[0]
    assert lines[1].endswith("eval loss 0.7500")


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    RunLog(tmp_path, writes=True).write(record(1, grad_norm=math.nan, loss=math.inf))
    text = (tmp_path / "logging.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert logged(tmp_path)[0]["grad_norm"] is None


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, writes=False)
    log.forget_after(0)
    log.write(record(1))
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_steps_that_are_done_again_are_logged_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path, writes=True)
    for iteration in (1, 2, 3):
        log.write(record(iteration))
    with (tmp_path / "logging.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')  # cut short by a crash
    log.forget_after(2)
    log.write(record(3))
    assert [one["iteration"] for one in logged(tmp_path)] == [1, 2, 3]


def test_waiting_time_is_that_of_next() -> None:
    items = TimedIterator(iter([1, 2]))
    assert list(items) == [1, 2]
    assert items.take_seconds() > 0 and items.take_seconds() == 0


def test_every_value_is_a_scalar_of_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first_step in (1, 3):  # a resume behind step 2
        log = RunLog(tmp_path, writes=True, tracker=TensorBoard(tmp_path, first_step))
        log.forget_after(first_step - 1)
        for iteration in range(first_step, 5):
            log.write(record(iteration, loss=10.0 * first_step + iteration, eval_loss=0.5 if iteration == 4 else None))
        log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert set(events.Tags()["scalars"]) == set().union(*logged(tmp_path))
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 11), (2, 12), (3, 33), (4, 34)]
    assert [event.step for event in events.Scalars("eval_loss")] == [4]


def test_row_16_tensorboard_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    tracker = TensorBoard(tmp_path, 1)
    broken = TensorBoard(tmp_path / "other", 1)
    broken._writer = SimpleNamespace(add_scalar=lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    for number, one in enumerate((tracker, broken)):
        log = RunLog(tmp_path, writes=True, tracker=one)
        log.write(record(2 * number + 1))
        log.write(record(2 * number + 2))
        log.close()
    assert [one["iteration"] for one in logged(tmp_path)] == [1, 2, 3, 4]
    assert [line.getMessage().partition(":")[0] for line in caplog.records] == ["TensorBoard events are no longer written"] * 2
    assert "No space left" in caplog.text


def test_utilisation_is_left_out_where_the_peak_is_not_known() -> None:
    assert utilisation(Totals(1.0, 1, 1, 1, flops=1e12), 1.0, ONE_RANK) == {}


def test_totals_of_a_batch_without_labels() -> None:
    totals = Totals(loss_sum=0.0, labelled_tokens=0, tokens=3, padded_tokens=4)
    assert (totals.loss, totals.pack_fill) == (0.0, 0.75)


def test_run_files_mask_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["swiftcp", "sft", "--dataset", "https://me:hunter2@host/rows.jsonl"])
    monkeypatch.setenv("SLURM_AUTH_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_SECRET", "hunter2")
    resolved: Any = SimpleNamespace(to_yaml=lambda: "model: x\n")
    write_run_files(tmp_path / "run", resolved, ONE_RANK)
    written = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert written.keys() == {"run_config.yaml", "env.json", "command.txt"}
    assert not any("hunter2" in text for text in written.values())
    env = json.loads(written["env.json"])
    assert env["variables"]["NCCL_DEBUG"] == "INFO" and env["packages"]["torch"] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_is_remembered_and_does_not_end_the_process(signum: int) -> None:
    before = signal.getsignal(signum)
    with stop_on_sigterm() as request:
        assert not request.agreed(ONE_RANK)
        os.kill(os.getpid(), signum)
        assert request.agreed(ONE_RANK)
    assert signal.getsignal(signum) == before
