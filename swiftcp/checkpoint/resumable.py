"""Checkpoints that a run continues from exactly, under any layout: weights, optimizer, schedule, random states, position.

A checkpoint is written beside its place, flushed, marked complete, and only then gets its name; `latest` follows, and older
ones go last. So at every instant the newest complete one is whole, whatever kills the process.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from swiftcp.checkpoint.catalog import (
    FileRecord,
    Marker,
    find_problems,
    next_number,
    point_latest,
    prune,
    record_file,
    remove_unfinished,
    step_folder,
)
from swiftcp.checkpoint.durable import aside_of, flush, publish_folder, start_folder, write_text
from swiftcp.checkpoint.hf_reader import unwrap
from swiftcp.checkpoint.random_states import load_random_states, save_random_states
from swiftcp.checkpoint.run_state import STATE_FILE, RunState, check_fingerprint
from swiftcp.checkpoint.safe_pickle import check_pickles
from swiftcp.checkpoint.together import from_first_rank, gather_all, is_first_rank, rank_and_size, together
from swiftcp.errors import CheckpointError
from swiftcp.failpoints import failpoint
from swiftcp.parallel.cpu_shim import cpu_mode

logger = logging.getLogger(__name__)

SCHEDULE_FILE = "schedule.json"


def save_checkpoint(
    output_dir: Path,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    state: RunState,
    *,
    dp_cp_group: dist.ProcessGroup,
    save_total_limit: int | None = None,
) -> Path:
    """Save the run as `checkpoints/step-NNNNNN`. Called on all ranks, which must see one and the same file system.

    Nothing happens where that very state is saved and whole already.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a rank could not write; what was saved before stays as it was.
    """
    final = step_folder(output_dir, state.step)
    if _is_saved(final, state):
        return final
    try:
        with together("preparing a checkpoint"):
            if is_first_rank():
                remove_unfinished(output_dir)
                start_folder(final)
        _write_shards(aside_of(final), model_chunks, optimizer, dp_cp_group)
        failpoint("checkpoint.shard_written")
        with together("writing a checkpoint"):
            own_files = _write_own_files(aside_of(final), scheduler, state)
        files = {name: record for records in gather_all(own_files) for name, record in records.items()}
        with together("completing a checkpoint"):
            if is_first_rank():
                _complete(final, files, output_dir, save_total_limit)
    except Exception:  # also an OSError of this rank: what was written must not fill the disk
        if is_first_rank():
            shutil.rmtree(aside_of(final), ignore_errors=True)
        raise
    return final


def load_checkpoint(
    checkpoint: Path,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    dp_cp_group: dist.ProcessGroup,
    fingerprint: Mapping[str, Any],
) -> RunState:
    """Put a run back to where it was saved. Called on all ranks, before anything draws a random number or reads data.

    Args:
        checkpoint: as `find_latest` found it, so known to be whole.
        fingerprint: of the recipe of this start; it must equal the saved one.

    Raises:
        ConfigError: the recipe differs in what changes the result.
        CheckpointError: a rank could not read, or the checkpoint is of another model.
    """
    with together("reading a checkpoint"):
        state = RunState.read(checkpoint)
        check_fingerprint(state.fingerprint, fingerprint, checkpoint)
    loaded = _read_shards(checkpoint, model_chunks, optimizer, dp_cp_group)
    with together("restoring a checkpoint"):
        optimizer.load_state_dict(loaded["optimizer"])
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


def _sharded_state(
    model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, dp_cp_group: dist.ProcessGroup, is_loading: bool
) -> dict[str, Any]:
    """The run's tensors as parts of whole ones, by names that no layout changes."""
    metadata = {
        "dp_cp_group": dp_cp_group,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    names = _chunk_names(model_chunks)
    state: dict[str, Any] = {
        name: unwrap(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for name, chunk in zip(names, model_chunks, strict=True)
    }
    model_state = state[names[0]] if len(names) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
    return state


def _chunk_names(model_chunks: Sequence[nn.Module]) -> list[str]:
    """megatron-core's own names of model chunks."""
    return ["model"] if len(model_chunks) == 1 else [f"model{number}" for number in range(len(model_chunks))]


def _write_shards(aside: Path, model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, dp_cp_group: dist.ProcessGroup) -> None:
    """Weights and optimizer through megatron-core, spread over the ranks that hold the same.

    A failed write raises on all ranks. Where megatron-core fails on one rank alone the others wait for it inside: that rank ends,
    and the launcher the others with it.
    """
    _keep_results_in_this_process()
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), dp_cp_group)
    try:
        with cpu_mode():
            dist_checkpointing.save(_sharded_state(model_chunks, optimizer, dp_cp_group, is_loading=False), str(aside), strategy)
    except (CheckpointException, CheckpointingException, OSError) as error:
        free = shutil.disk_usage(aside).free / 2**30  # megatron-core hands on the kind of error alone; its log has the reason
        raise CheckpointError(f"{aside} could not be written ({free:.1f} GiB are free there): {error}") from error


def _keep_results_in_this_process() -> None:
    """megatron-core 0.19 hands the writer's results over through a manager process, also where the writer runs in this process.

    Spawning it takes seconds, and runs the user's script a second time where that has no `__main__` guard.
    """
    filesystem_async._results_queue = queue.Queue()


def _read_shards(
    checkpoint: Path, model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, dp_cp_group: dist.ProcessGroup
) -> dict[str, Any]:
    """Fill the model; returns all that was read."""
    with together("reading a checkpoint"), cpu_mode():
        check_pickles(checkpoint)
        wanted = _sharded_state(model_chunks, optimizer, dp_cp_group, is_loading=True)
        try:
            loaded = dist_checkpointing.load(wanted, str(checkpoint), validate_access_integrity=False)
        except (CheckpointException, CheckpointingException, OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{checkpoint} does not hold this model and its optimizer: {error}") from error
        for name, chunk in zip(_chunk_names(model_chunks), model_chunks, strict=True):
            unwrap(chunk).load_state_dict(loaded[name])
    return loaded


def _write_own_files(aside: Path, scheduler: OptimizerParamScheduler, state: RunState) -> dict[str, FileRecord]:
    """What this rank alone writes; flushes and takes down all files of this rank."""
    rank, _ = rank_and_size()
    files = [save_random_states(aside), *aside.glob(f"__{rank}_*.distcp")]
    if is_first_rank():
        write_text(aside / STATE_FILE, state.to_json())
        write_text(aside / SCHEDULE_FILE, json.dumps(scheduler.state_dict(), indent=2) + "\n")
        files += [aside / STATE_FILE, aside / SCHEDULE_FILE, aside / ".metadata", aside / "metadata.json"]
    return {str(file.relative_to(aside)): record_file(file) for file in files}


def _complete(final: Path, files: Mapping[str, FileRecord], output_dir: Path, save_total_limit: int | None) -> None:
    """Mark the checkpoint complete, give it its name, let `latest` follow, and let older ones go: in this order."""
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
