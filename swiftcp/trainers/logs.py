"""The log of a run: one line a step on the console, one JSON object a step in `logging.jsonl`. Written on the first rank alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from swiftcp.checkpoint.durable import write_text
from swiftcp.parallel.mesh import Mesh
from swiftcp.trainers.flops import peak_tflops
from swiftcp.trainers.step import Totals
from swiftcp.trainers.trackers import TensorBoard

LOG_FILE = "logging.jsonl"


class TimedIterator[T]:
    """An iterator that adds up how long its consumer waited for it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += perf_counter() - began

    def take_seconds(self) -> float:
        """Seconds waited since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Clock:
    """Seconds of a run over all its sessions."""

    def __init__(self, first_step: int, num_steps: int, seconds_before: float) -> None:
        self._began = perf_counter()
        self._first_step, self._num_steps, self._seconds_before = first_step, num_steps, seconds_before

    def elapsed(self) -> float:
        return self._seconds_before + perf_counter() - self._began

    def remaining(self, step: int) -> float:
        """Estimated from the steps of this session alone."""
        return (perf_counter() - self._began) / max(step - self._first_step, 1) * (self._num_steps - step)


@dataclass(frozen=True)
class LogRecord:
    """One object of `logging.jsonl`. Fields that are None are left out."""

    iteration: int
    train_iters: int
    epoch: float
    """Passes over the data so far."""
    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    """Of this step."""
    tokens: int
    """Real tokens since the beginning of the run."""
    labelled_tokens: int
    """Of this step."""
    pack_fill: float
    """Real over padded tokens of this step."""
    tokens_per_second_per_gpu: float
    memory_gib: float
    """Of the first rank: peak on its GPU, or resident on a CPU."""
    data_wait_fraction: float
    """Share of the step in which the first rank waited for data."""
    seconds: float
    """Of this step, without evaluation and saving."""
    elapsed_seconds: float
    """Since the beginning of the run, all its sessions together."""
    remaining_seconds: float
    """Estimated from the steps of this session."""
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    load_balancing_loss: float | None = None
    """Of this step's routers, 1 where experts are used evenly, without its coefficient."""
    z_loss: float | None = None
    """Of this step's routers, without its coefficient."""
    eval_loss: float | None = None
    skipped_steps: int | None = None
    """Steps so far whose gradient was not finite."""

    def values(self) -> dict[str, float]:
        """Those that are there, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def to_json(self) -> str:
        finite = {name: value if math.isfinite(value) else None for name, value in self.values().items()}
        return json.dumps(finite)

    def to_line(self) -> str:
        parts = [
            f"step {self.iteration}/{self.train_iters}",
            f"loss {self.loss:.4f}",
            f"grad norm {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/rank",
            f"{self.seconds:.2f} s",
            f"{_duration(self.remaining_seconds)} left",
        ]
        if self.mfu is not None:
            parts.insert(5, f"mfu {self.mfu:.1%}")
        if self.eval_loss is not None:
            parts.append(f"eval loss {self.eval_loss:.4f}")
        return " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def memory_gib(device: torch.device) -> float:
    """Peak of what torch allocated on a GPU, or the memory of this process on a CPU."""
    num_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return num_bytes / 2**30


def utilisation(totals: Totals, seconds: float, mesh: Mesh) -> dict[str, Any]:
    """Model TFLOP/s of a rank and its share of the device's peak; nothing where the peak is not known."""
    peak = peak_tflops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
    if peak is None:
        return {}
    tflops = totals.flops / seconds / mesh.world_size / 1e12
    return {"tflops_per_gpu": tflops, "mfu": tflops / peak}


class RunLog:
    """Appends to `logging.jsonl`, prints, and tells the tracker. On other ranks it does nothing."""

    def __init__(self, output_dir: Path, *, writes: bool, tracker: TensorBoard | None = None) -> None:
        self._file = output_dir / LOG_FILE
        self._writes = writes
        self._tracker = tracker

    def forget_after(self, iteration: int) -> None:
        """Drop what was logged of steps that are about to be done again."""
        if not self._writes or not self._file.exists():
            return
        lines = self._file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if (logged := _iteration(line)) is not None and logged <= iteration]
        write_text(self._file, "".join(f"{line}\n" for line in kept))

    def write(self, record: LogRecord) -> None:
        if not self._writes:
            return
        with self._file.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
        print(record.to_line(), flush=True)
        if self._tracker is not None:
            self._tracker.write(record.values(), record.iteration)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def _iteration(line: str) -> int | None:
    """None for a line that a crash cut short."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return None
