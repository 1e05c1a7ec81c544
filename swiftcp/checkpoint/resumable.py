"""Checkpoints that a run continues from exactly, under any layout: weights, optimizer, schedule, random states, position.

A checkpoint is written beside its place, flushed, marked complete, and only then gets its name; `latest` and `best` follow, and
older ones go last. So at every instant the newest complete one is whole, whatever kills the process.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from swiftcp.checkpoint.catalog import (
    FileRecord,
    Marker,
    find_problems,
    next_number,
    point_best,
    point_latest,
    prune,
    record_file,
    remove_unfinished,
    step_folder,
)
from swiftcp.checkpoint.durable import aside_of, flush, publish_folder, start_folder, write_text
from swiftcp.checkpoint.random_states import load_random_states, save_random_states
from swiftcp.checkpoint.run_state import RunState, check_fingerprint
from swiftcp.checkpoint.shards import ShardWrite, read_shards
from swiftcp.checkpoint.together import from_first_rank, gather_all, is_first_rank, together
from swiftcp.config.paths import STATE_FILE
from swiftcp.errors import CheckpointError
from swiftcp.failpoints import failpoint

logger = logging.getLogger(__name__)

SCHEDULE_FILE = "schedule.json"
_Records = dict[str, FileRecord]


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    final: Path
    shards: ShardWrite
    own_files: _Records
    """What this rank has written already."""
    written: Future[_Records]
    """This rank's shards, when they are on the disk."""


class Saver:
    """Saves a run as `checkpoints/step-NNNNNN`, one checkpoint after the other. Used alike on all ranks, which see one file system."""

    def __init__(
        self,
        output_dir: Path,
        model_chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        *,
        dp_cp_group: dist.ProcessGroup,
        save_total_limit: int | None = None,
        with_optimizer: bool = True,
        in_background: bool = False,
    ) -> None:
        """
        Args:
            with_optimizer: False: weights, schedule, random states and position alone.
            in_background: write beside the training; `poll` or `wait` then completes the checkpoint.
        """
        self._output_dir = output_dir
        self._model_chunks = model_chunks
        self._optimizer = optimizer if with_optimizer else None
        self._scheduler = scheduler
        self._dp_cp_group = dp_cp_group
        self._save_total_limit = save_total_limit
        self._in_background = in_background
        self._pending: _Pending | None = None

    def save(self, state: RunState) -> None:
        """Save what the run is now, behind the save before. Nothing happens where that very state is saved and whole already.

        Raises:
            CheckpointError: a rank could not write, this checkpoint or the one before; what was complete before stays as it was.
        """
        self.wait()
        state = replace(state, has_optimizer=self._optimizer is not None)
        final = step_folder(self._output_dir, state.step)
        if _is_saved(final, state):
            return
        with _no_rest(final):
            with together("preparing a checkpoint"):
                if is_first_rank():
                    remove_unfinished(self._output_dir)
                    start_folder(final)
            shards = ShardWrite(aside_of(final), self._model_chunks, self._optimizer, self._dp_cp_group, copies=self._in_background)
            with together("writing a checkpoint"):
                own_files = _write_own_files(aside_of(final), self._scheduler, state)
        self._pending = _Pending(final, shards, own_files, Future())
        if self._in_background:
            # Where the process ends before the thread, nobody would complete what it writes.
            Thread(target=_write, args=(self._pending,), name="checkpoint", daemon=True).start()
        else:
            _write(self._pending)
            self.wait()

    def poll(self) -> None:
        """At a step's end: complete the checkpoint that is being written if all ranks have written their part of it.

        Raises:
            CheckpointError: a rank could not write; on all ranks.
        """
        if self._pending is not None and all(gather_all(self._pending.written.done())):
            self.wait()

    def wait(self) -> None:
        """Complete the checkpoint that is being written, if any.

        Raises:
            CheckpointError: a rank could not write; on all ranks.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with _no_rest(pending.final):
            with together("writing a checkpoint"):
                own_files = pending.own_files | pending.written.result()
            contents = pending.shards.complete()
            with together("writing a checkpoint"):
                own_files |= _records(aside_of(pending.final), contents)
            files = {name: record for records in gather_all(own_files) for name, record in records.items()}
            with together("completing a checkpoint"):
                if is_first_rank():
                    _complete(pending.final, files, self._output_dir, self._save_total_limit)


def load_checkpoint(
    checkpoint: Path,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    dp_cp_group: dist.ProcessGroup,
    fingerprint: Mapping[str, Any],
    with_optimizer: bool = True,
) -> RunState:
    """Put a run back to where it was saved. Called on all ranks, before anything draws a random number or reads data.

    Args:
        checkpoint: as `find_latest` found it, so known to be whole.
        fingerprint: of the recipe of this start; it must equal the saved one.
        with_optimizer: False: its moments begin anew.

    Raises:
        ConfigError: the recipe differs in what changes the result.
        CheckpointError: a rank could not read, or the checkpoint is of another model.
    """
    with together("reading a checkpoint"):
        state = RunState.read(checkpoint)
        check_fingerprint(state.fingerprint, fingerprint, checkpoint)
    loaded = read_shards(checkpoint, model_chunks, optimizer if with_optimizer else None, dp_cp_group)
    with together("restoring a checkpoint"):
        if with_optimizer:
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            optimizer.reload_model_params()
        _restore_schedule(checkpoint, scheduler)
        load_random_states(checkpoint)
    logger.info("continuing from %s: step %d, epoch %d, %d tokens", checkpoint, state.step, state.epoch, state.tokens)
    return state


def _is_saved(final: Path, state: RunState) -> bool:
    """Whether a checkpoint holds this state already, and is whole. What is damaged, or of another run, is written again."""

    def same() -> bool:
        try:
            return RunState.read(final) == RunState.from_json(state.to_json())
        except CheckpointError:
            return False

    return from_first_rank(same() if is_first_rank() else None) and not find_problems(final)


@contextmanager
def _no_rest(final: Path) -> Iterator[None]:
    """Where a save fails, on all ranks or with an OSError of this one, what was written must not fill the disk."""
    try:
        yield
    except Exception:
        if is_first_rank():
            shutil.rmtree(aside_of(final), ignore_errors=True)
        raise


def _write(pending: _Pending) -> None:
    """Write this rank's shards and take them down."""
    try:
        records = _records(aside_of(pending.final), pending.shards.write())
        failpoint("checkpoint.shard_written")
        pending.written.set_result(records)
    except Exception as error:  # whatever it is, `wait` tells it on all ranks
        pending.written.set_exception(error)


def _records(aside: Path, files: Sequence[Path]) -> _Records:
    """Flushes files and takes them down."""
    return {str(file.relative_to(aside)): record_file(file) for file in files}


def _write_own_files(aside: Path, scheduler: OptimizerParamScheduler, state: RunState) -> _Records:
    """What this rank writes beside its shards."""
    files = [save_random_states(aside)]
    if is_first_rank():
        write_text(aside / STATE_FILE, state.to_json())
        write_text(aside / SCHEDULE_FILE, json.dumps(scheduler.state_dict(), indent=2) + "\n")
        files += [aside / STATE_FILE, aside / SCHEDULE_FILE]
    return _records(aside, files)


def _complete(final: Path, files: Mapping[str, FileRecord], output_dir: Path, save_total_limit: int | None) -> None:
    """Mark the checkpoint complete, give it its name, let `latest` and `best` follow, and let older ones go: in this order."""
    aside = aside_of(final)
    unseen = [name for name, record in files.items() if not (aside / name).is_file() or (aside / name).stat().st_size != record.num_bytes]
    if unseen:
        raise CheckpointError(
            f"another rank wrote {unseen[0]}, which is not in {aside} here: output_dir must be on storage that all nodes share"
        )
    for folder in {(aside / name).parent for name in files}:
        flush(folder)
    Marker(next_number(output_dir), files).write(aside)
    failpoint("checkpoint.marker_written")
    publish_folder(aside, final)
    failpoint("checkpoint.published")
    point_latest(final)
    failpoint("checkpoint.latest_written")
    point_best(output_dir)
    if save_total_limit is not None:
        prune(output_dir, save_total_limit)
        failpoint("checkpoint.pruned")
    logger.info("saved %s", final)


def _restore_schedule(checkpoint: Path, scheduler: OptimizerParamScheduler) -> None:
    """Set the number of steps, once; the schedule's shape is that of the recipe.

    megatron-core's own `load_state_dict` adds the saved steps to those that the scheduler has made.
    """
    saved = json.loads((checkpoint / SCHEDULE_FILE).read_text(encoding="utf-8"))
    differing = [
        f"{key} {saved[key]} there, {value} now"
        for key, value in scheduler.state_dict().items()
        if key != "num_steps" and saved[key] != value
    ]
    if differing and is_first_rank():
        logger.warning("the learning rate's schedule is not that of %s, and the new one is followed: %s", checkpoint, "; ".join(differing))
    scheduler.num_steps = 0
    scheduler.step(increment=saved["num_steps"])
