"""Where a run goes on from, and what of a recipe must be as it was for that."""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from pathlib import Path
from typing import Any

from swiftcp.checkpoint.catalog import find_latest, find_problems
from swiftcp.checkpoint.run_state import RunState, check_fingerprint
from swiftcp.config.concerns import TrainConfig
from swiftcp.data.encode import Mode
from swiftcp.data.plan import StepPlan
from swiftcp.errors import CheckpointError, ConfigError
from swiftcp.trainers.setup import Source

logger = logging.getLogger(__name__)

NEUTRAL_KEYS = frozenset(
    {
        # layout and machine
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "context_parallel_size",
        "cp_comm_type",
        "cp_partition_mode",
        "hierarchical_context_parallel_sizes",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "attention_backend",
        "micro_batch_size",
        "device",
        "nproc_per_node",
        "dataloader_num_workers",
        # memory against time
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "vit_gradient_checkpointing",
        # where the rows lie: what they hold is compared by `rows`
        "dataset",
        "media_root",
        "allow_http",
        "media_timeout",
        # what is written and looked at
        "output_dir",
        "save_steps",
        "save_total_limit",
        "save_safetensors",
        "merge_lora",
        "async_save",
        "no_save_optim",
        "no_load_optim",
        "resume_strict",
        "resume",
        "logging_steps",
        "report_to",
        "eval_steps",
        "eval_iters",
        "val_dataset",
        # a run may be made longer or shorter; the plan's hash covers what they mean for the data
        "num_train_epochs",
        "train_iters",
    }
)
"""Keys that leave the result as it is; every other key must be the same when a run goes on."""


def data_hash(plan: StepPlan) -> str:
    """Of the rows' lengths and how they are packed and ordered, however long the run is."""
    any_length = StepPlan(
        plan.lengths,
        seed=plan.seed,
        global_batch_size=plan.global_batch_size,
        packing_length=plan.packing_length,
        pack_align=plan.pack_align,
        train_iters=1,
    )
    return any_length.plan_hash()


def fingerprint(config: TrainConfig, mode: Mode, plan: StepPlan, source: Source, rows: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to be gone on from; `rows` is the digest of what the rows hold."""
    values = {key: value for key, value in config.model_dump().items() if key not in NEUTRAL_KEYS}
    template = hashlib.sha256(json.dumps(source.processor.chat_template).encode()).hexdigest()
    return {**values, "model": str(source.folder.resolve()), "mode": mode, "chat_template": template, "rows": rows, "data": data_hash(plan)}


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint to go on from; None to begin. Called on all ranks.

    Raises:
        CheckpointError: checkpoints are there and none is whole, or the one that was asked for is not.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return find_latest(Path(str(config.output_dir)), strict=config.resume_strict)
    checkpoint = Path(config.resume)
    if problems := find_problems(checkpoint):
        raise CheckpointError("\n  ".join([f"resume {checkpoint} is not whole:", *problems]))
    return checkpoint


def saved_step(checkpoint: Path | None, current: dict[str, Any], plan: StepPlan, *, no_load_optim: bool = False) -> int:
    """Steps that are done already. Read before the model is built, so that a recipe that does not fit is refused early.

    Raises:
        ConfigError: the recipe differs from the checkpoint's in what changes the result, or its steps would hold other rows: a
            longer run fills the last step of a shorter one with the next epoch's rows. Or the checkpoint has no optimizer, and the
            recipe does not say that one may begin anew.
    """
    if checkpoint is None:
        return 0
    state = RunState.read(checkpoint)
    check_fingerprint(state.fingerprint, current, checkpoint)
    if not state.has_optimizer and not no_load_optim:
        raise ConfigError(
            f"{checkpoint} was saved with no_save_optim and holds no optimizer: set no_load_optim true to go on with moments that begin "
            "anew (the losses will not be those of an uninterrupted run), or set resume to a checkpoint that has one"
        )
    samples = sum(len(pack) for step in range(min(state.step, plan.num_steps)) for pack in plan.step(step))
    if state.step <= plan.num_steps and samples != state.samples:
        raise ConfigError(
            f"{checkpoint} stands behind {state.step} steps of {state.samples} rows, which this recipe's num_train_epochs or train_iters "
            f"fills with {samples}: set them as they were, or set another output_dir and start from {checkpoint.parents[1] / 'hf'}"
        )
    return state.step


def first_state(current: dict[str, Any]) -> RunState:
    """Of a run that begins."""
    return RunState(
        step=0, epoch=0, global_batches=0, samples=0, tokens=0, labelled_tokens=0, plan_hash=current["data"], fingerprint=current
    )


def place_in_epoch(plan: StepPlan, step: int) -> tuple[int, int]:
    """(epochs that are finished, steps that began in the unfinished one) before a step."""
    epoch = int(plan.epochs_before(step))
    return epoch, step - bisect_left(range(step), epoch, key=lambda earlier: int(plan.epochs_before(earlier)))
