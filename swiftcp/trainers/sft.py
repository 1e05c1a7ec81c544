"""`swiftcp sft` and `swiftcp pt`: the training loop, from its first line to its last. Runs in each rank process."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swiftcp.checkpoint.resumable import Saver, load_checkpoint
from swiftcp.checkpoint.run_state import RunState
from swiftcp.checkpoint.together import gather_all
from swiftcp.config.concerns import TrainConfig
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.wording import counted
from swiftcp.data.dataset import BadRow, EncodedDataset
from swiftcp.data.encode import Mode
from swiftcp.data.loader import BatchStream, batches_in_order
from swiftcp.data.plan import StepPlan
from swiftcp.errors import PreemptedError, TrainingError
from swiftcp.models.mm_gpt_model import MultimodalGPTModel, named_parameters
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.mesh import Mesh, stop
from swiftcp.parallel.moe import AUXILIARY_LOSSES
from swiftcp.parallel.pipeline import sum_over_stages
from swiftcp.trainers.adapters import write_weights
from swiftcp.trainers.ahead import plan_ahead
from swiftcp.trainers.bad_rows import BadRowsOfRanks, write_bad_rows
from swiftcp.trainers.datasets import batch_layout, make_encoder, open_dataset
from swiftcp.trainers.evaluation import evaluate
from swiftcp.trainers.logs import Clock, LogRecord, RunLog, TimedIterator, memory_gib, utilisation
from swiftcp.trainers.optimizer import build_optimizer, build_scheduler, check_optimizer, wrap_model
from swiftcp.trainers.resume import find_checkpoint, fingerprint, first_state, place_in_epoch, saved_step
from swiftcp.trainers.run_files import write_run_files
from swiftcp.trainers.setup import Source, load_model, load_source, recompute_fields, select_trained, start_ranks
from swiftcp.trainers.signals import StopRequest, stop_on_sigterm
from swiftcp.trainers.step import Runner, Totals, train_step
from swiftcp.trainers.trackers import TensorBoard

logger = logging.getLogger(__name__)

MOST_SKIPPED_IN_A_ROW = 5
"""Steps without a finite gradient, one after the other, after which a run is given up."""


@dataclass(frozen=True)
class Data:
    """The rows of a run, and the order in which they are trained."""

    training: EncodedDataset
    validation: EncodedDataset | None
    plan: StepPlan

    @property
    def dropped(self) -> tuple[BadRow, ...]:
        """Of both, each once: rows that were split off for validation come with the training rows' list."""
        validation = self.validation.dropped if self.validation is not None else ()
        return tuple(dict.fromkeys((*self.training.dropped, *validation)))


@dataclass(frozen=True)
class Run:
    """All that stays the same from the first step to the last."""

    config: TrainConfig
    mesh: Mesh
    source: Source
    data: Data
    runner: Runner
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    agree_on_validation: BadRowsOfRanks | None
    """See `agreement`; training has another, for its rows may be read by a thread meanwhile."""

    @property
    def output_dir(self) -> Path:
        return Path(str(self.config.output_dir))


def train(resolved: ResolvedConfig[TrainConfig], mode: Mode) -> None:
    """Train from the checkpoint folder `model`, or go on from a checkpoint, and write the last weights.

    Raises:
        SwiftcpError: recipe, data or weights are wrong, a rank failed, or the run was asked to stop (`PreemptedError`).
    """
    config = resolved.config
    mesh = start_ranks(config)
    with cpu_shim.cpu_mode():
        source = load_source(Path(config.model))
        check_optimizer(config)
        data = load_data(config, mode, source, mesh)
        recipe = fingerprint(config, mode, data.plan, source, data.training.digest)
        checkpoint = find_checkpoint(config)
        start_step = saved_step(checkpoint, recipe, data.plan, no_load_optim=config.no_load_optim)
        if mesh.rank == 0:
            write_run_files(Path(str(config.output_dir)), resolved, mesh)
            write_bad_rows(Path(str(config.output_dir)), data.dropped, keep_decoded=start_step > 0)
        stream = open_stream(config, data, mesh, start_step)

        run = build_run(config, source, data, mesh)
        state = first_state(recipe) if checkpoint is None else restore(run, checkpoint, recipe)
        if start_step < data.plan.num_steps:
            run_steps(run, state, stream)
        else:
            logger.info("training was done already: step %d of %d", start_step, data.plan.num_steps)
        if config.save_safetensors:
            write_weights(run.runner.chunks, source, mesh, run.output_dir / "hf", merge=config.merge_lora)
    stop()


def load_data(config: TrainConfig, mode: Mode, source: Source, mesh: Mesh) -> Data:
    """Look at all rows and plan the run. The same on every rank, errors too.

    Raises:
        DataError: rows are bad, a data set cannot be read, or nothing of the training rows is trained.
        TrainingError: ranks read different rows.
    """
    encoder = make_encoder(config, mode, source, mesh)
    training, validation = open_dataset(config.dataset, encoder, config, mesh, check_media=config.strict), None
    if config.val_dataset:
        validation = open_dataset(config.val_dataset, encoder, config, mesh, check_media=config.strict)
    elif config.split_dataset_ratio:
        training, validation = training.split(config.split_dataset_ratio, config.seed)
    training.require_trained("dataset")
    plan = StepPlan(
        training.lengths,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        packing_length=config.packing_length if config.packing else None,
        pack_align=config.pack_align,
        num_train_epochs=config.num_train_epochs,
        train_iters=config.train_iters,
    )
    if len(set(gather_all(plan.plan_hash()))) > 1:
        raise TrainingError("ranks planned different packs: every machine must read the same data with the same version of swiftcp")
    logger.info("%s, pack fill %.3f, %s", counted(len(training), "row"), plan.fill(), counted(plan.num_steps, "step"))
    return Data(training, validation, plan)


def open_stream(config: TrainConfig, data: Data, mesh: Mesh, start_step: int) -> BatchStream:
    """This rank's micro-batches from `start_step` on."""
    workers = config.dataloader_num_workers or 0
    agree = agreement(config, data.training)
    return BatchStream(data.training, data.plan, batch_layout(config, mesh), start_step=start_step, num_workers=workers, agree=agree)


def agreement(config: TrainConfig, dataset: EncodedDataset) -> BadRowsOfRanks | None:
    """How ranks agree on rows that cannot be decoded, where these are no error. Called on all ranks."""
    return None if config.strict else BadRowsOfRanks(Path(str(config.output_dir)), len(dataset))


def build_run(config: TrainConfig, source: Source, data: Data, mesh: Mesh) -> Run:
    """Model, gradient reduction, optimizer and schedule.

    Raises:
        WeightsError: the folder does not hold exactly the model's weights.
    """
    chunks = load_model(config, source, mesh, checkpointed_tower=config.vit_gradient_checkpointing, **recompute_fields(config))
    select_trained(chunks, config, source.family)
    log_parameters(chunks, mesh)
    wrapped = wrap_model(chunks, mesh, use_distributed_optimizer=bool(config.use_distributed_optimizer))
    optimizer = build_optimizer(wrapped, config, source.family)
    return Run(
        config=config,
        mesh=mesh,
        source=source,
        data=data,
        runner=Runner(wrapped, mesh, source.geometry, chunks[0].vocab_size, reads_whole_steps=mesh.pp_size > 1 and not config.strict),
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config, data.plan.num_steps),
        agree_on_validation=agreement(config, data.validation) if data.validation is not None else None,
    )


def log_parameters(chunks: Sequence[MultimodalGPTModel], mesh: Mesh) -> None:
    """How many parameters the model has, and how many are trained, over all pipeline stages."""
    parameters = [parameter for chunk in chunks for _, parameter in named_parameters(chunk)]
    counts = torch.tensor([sum(p.numel() for p in parameters if p.requires_grad or every) for every in (False, True)], device=mesh.device)
    trained, total = sum_over_stages(counts, mesh).tolist()
    logger.info("%s of %s parameters are trained", f"{trained:,}", f"{total:,}")


def restore(run: Run, checkpoint: Path, recipe: dict[str, Any]) -> RunState:
    """Put weights, optimizer, schedule and random states back to where they were saved."""
    return load_checkpoint(
        checkpoint,
        run.runner.chunks,
        run.optimizer,
        run.scheduler,
        dp_cp_group=run.mesh.dp_cp_group,
        fingerprint=recipe,
        with_optimizer=not run.config.no_load_optim,
    )


def open_saver(run: Run) -> Saver:
    """What saves this run."""
    return Saver(
        run.output_dir,
        run.runner.chunks,
        run.optimizer,
        run.scheduler,
        dp_cp_group=run.mesh.dp_cp_group,
        save_total_limit=run.config.save_total_limit,
        with_optimizer=not run.config.no_save_optim,
        in_background=run.config.async_save,
    )


def run_steps(run: Run, state: RunState, stream: BatchStream) -> None:
    """Every step that is left, with the evaluations and checkpoints that are due.

    Raises:
        PreemptedError: some rank got SIGTERM; a checkpoint is saved.
        TrainingError: a rank failed, or gradients are not finite again and again.
    """
    num_steps = run.data.plan.num_steps
    log = open_log(run, state.step)
    batches = TimedIterator(plan_ahead(iter(stream), run.mesh, run.source.geometry))
    clock = Clock(state.step, num_steps, state.elapsed_seconds)
    skipped_in_a_row, saver = 0, open_saver(run)
    with closing(log), stop_on_sigterm() as request:
        while state.step < num_steps:
            lr = run.scheduler.get_lr({})
            began = perf_counter()
            totals, grad_norm = train_step(run.runner, run.optimizer, run.scheduler, batches, stream.num_micro_batches)
            seconds, waited = perf_counter() - began, batches.take_seconds()
            skipped_in_a_row = count_skipped(skipped_in_a_row, grad_norm, state.step + 1)
            state = advance(run, state, totals, grad_norm, clock.elapsed())
            eval_loss = evaluate_if_due(run, state, stream.num_micro_batches)
            if is_due(state.step, run.config.logging_steps, num_steps) or eval_loss is not None:
                log.write(make_record(run, state, totals, grad_norm, lr, seconds, waited, clock, eval_loss))
            save_if_due(run, saver, state, eval_loss, request)
        saver.wait()


def open_log(run: Run, step: int) -> RunLog:
    """The log of the steps behind `step`; what was logged of them before is dropped."""
    writes = run.mesh.rank == 0
    tracked = writes and "tensorboard" in (run.config.report_to or [])
    log = RunLog(run.output_dir, writes=writes, tracker=TensorBoard(run.output_dir, step + 1) if tracked else None)
    log.forget_after(step)
    return log


def is_due(step: int, every: int, num_steps: int) -> bool:
    """What happens every so many steps happens behind the last one too."""
    return step % every == 0 or step == num_steps


def count_skipped(skipped_in_a_row: int, grad_norm: float, step: int) -> int:
    """Steps in a row, this one included, whose gradient was not finite.

    Raises:
        TrainingError: they are too many.
    """
    if math.isfinite(grad_norm):
        return 0
    if skipped_in_a_row + 1 == MOST_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"the gradient was not finite in {MOST_SKIPPED_IN_A_ROW} steps in a row, the last of them step {step}: "
            "look at the rows and the learning rate of the steps before; training can go on from the last checkpoint"
        )
    return skipped_in_a_row + 1


def advance(run: Run, state: RunState, totals: Totals, grad_norm: float, elapsed_seconds: float) -> RunState:
    """The state behind one more step."""
    step = state.step + 1
    epoch, global_batches = place_in_epoch(run.data.plan, step)
    return replace(
        state,
        step=step,
        epoch=epoch,
        global_batches=global_batches,
        samples=state.samples + sum(len(pack) for pack in run.data.plan.step(state.step)),
        tokens=state.tokens + totals.tokens,
        labelled_tokens=state.labelled_tokens + totals.labelled_tokens,
        skipped_steps=state.skipped_steps + (not math.isfinite(grad_norm)),
        elapsed_seconds=elapsed_seconds,
    )


def evaluate_if_due(run: Run, state: RunState, num_micro_batches: int) -> float | None:
    """The loss over the validation rows, every `eval_steps` and at the end."""
    config, validation = run.config, run.data.validation
    if (
        validation is None
        or not config.eval_iters
        or not is_due(state.step, config.eval_steps or config.save_steps, run.data.plan.num_steps)
    ):
        return None
    workers = config.dataloader_num_workers or 0
    batches = batches_in_order(validation, batch_layout(config, run.mesh), num_workers=workers, agree=run.agree_on_validation)
    return evaluate(run.runner, batches, num_micro_batches, num_steps=None if config.eval_iters < 0 else config.eval_iters).loss


def save_if_due(run: Run, saver: Saver, state: RunState, eval_loss: float | None, request: StopRequest) -> None:
    """A checkpoint every `save_steps`, at the end, and where a rank was asked to stop; and the end of one that is being written.

    Raises:
        CheckpointError: a rank could not write.
        PreemptedError: it was asked to, and the run is not at its end.
    """
    num_steps = run.data.plan.num_steps
    stopped = request.agreed(run.mesh) and state.step < num_steps
    saver.poll()
    if stopped or is_due(state.step, run.config.save_steps, num_steps):
        is_finite = eval_loss is not None and math.isfinite(eval_loss)
        saver.save(replace(state, eval_loss=eval_loss if is_finite else None))
    if stopped:
        saver.wait()
        raise PreemptedError(f"asked to stop: saved step {state.step} of {num_steps}; start the run again to go on")


def make_record(
    run: Run,
    state: RunState,
    totals: Totals,
    grad_norm: float,
    lr: float,
    seconds: float,
    waited_seconds: float,
    clock: Clock,
    eval_loss: float | None,
) -> LogRecord:
    """What is logged of the step that led to `state`."""
    return LogRecord(
        iteration=state.step,
        train_iters=run.data.plan.num_steps,
        epoch=run.data.plan.epochs_before(state.step),
        loss=totals.loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=state.tokens,
        labelled_tokens=totals.labelled_tokens,
        pack_fill=totals.pack_fill,
        tokens_per_second_per_gpu=totals.tokens / seconds / run.mesh.world_size,
        memory_gib=memory_gib(run.mesh.device),
        data_wait_fraction=min(1.0, waited_seconds / seconds),
        seconds=seconds,
        elapsed_seconds=clock.elapsed(),
        remaining_seconds=clock.remaining(state.step),
        eval_loss=eval_loss,
        skipped_steps=state.skipped_steps or None,
        **dict(zip(AUXILIARY_LOSSES, totals.router_losses or (), strict=False)),
        **utilisation(totals, seconds, run.mesh),
    )
