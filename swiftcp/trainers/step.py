"""One optimizer step: megatron-core's schedule over the micro-batches, then the optimizer.

The loss is a sum of weight x token loss divided by one count of labelled tokens over all ranks and micro-batches
(`calculate_per_token_loss`), so neither the layout nor the way labels fall on ranks changes the gradient.

Legend: N labelled local tokens.
"""

from __future__ import annotations

import itertools
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from swiftcp.checkpoint.together import gather_all
from swiftcp.data.batch import Batch
from swiftcp.errors import LostContactError, SwiftcpError, TrainingError, is_lost_contact
from swiftcp.models.inputs import ModelInputs
from swiftcp.models.mm_gpt_model import named_parameters
from swiftcp.models.towers import Geometry
from swiftcp.parallel.mesh import Mesh
from swiftcp.parallel.moe import take_auxiliary_losses, trains_routers
from swiftcp.parallel.pipeline import run_schedule, sum_over_stages
from swiftcp.trainers.ahead import PlannedBatch, send
from swiftcp.trainers.flops import training_flops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks and micro-batches of a step or an evaluation."""

    loss_sum: float
    labelled_tokens: int
    tokens: int
    """Real tokens, without padding."""
    padded_tokens: int
    flops: float = 0.0
    """Of the model, forward and backward."""
    router_losses: tuple[float, ...] | None = None
    """Of `AUXILIARY_LOSSES`: the mean over micro-batches and layers with experts; None where routers are not trained for them."""

    @property
    def loss(self) -> float:
        """Mean over the labelled tokens; 0 where there is none."""
        return self.loss_sum / max(self.labelled_tokens, 1)

    @property
    def pack_fill(self) -> float:
        """Real over padded tokens."""
        return self.tokens / max(self.padded_tokens, 1)


@dataclass(frozen=True)
class Runner:
    """The wrapped model and what a micro-batch needs on its way into it."""

    chunks: list[DistributedDataParallel]
    """Of this rank's pipeline stage: one, or as many as it has virtual stages."""
    mesh: Mesh
    geometry: Geometry
    vocab_size: int
    reads_whole_steps: bool = False
    """Read all micro-batches of a step before the first is computed: ranks agree on bad rows, for which stages cannot wait in between."""


NUM_EXTENTS = 4
"""See `_extent`."""
Report = tuple[Tensor, tuple[float, ...]]
"""Of one micro-batch on one rank: the loss sum, which is still on the device, and counts, which are on the host."""


def weighted_loss(losses_N: Tensor, weights_N: Tensor, extent: Sequence[float]) -> tuple[Tensor, int, Report]:
    """What megatron-core's schedules take: (sum of weight x loss, number of labelled tokens, report). Nothing waits for the device.

    `extent` is this rank's share of what the micro-batch comprises, and stands behind the number of labels in the report.
    """
    loss_sum = (losses_N * weights_N).sum()
    num_labels = losses_N.numel()
    return loss_sum, num_labels, (loss_sum.detach(), (num_labels, *extent))


def _extent(runner: Runner, batch: Batch) -> tuple[float, float, float, float]:
    """Real tokens, padded tokens, model FLOPs of a micro-batch, and 1 if it holds rows; counted on one rank of those that share it."""
    if runner.mesh.cp_rank != 0:
        return 0.0, 0.0, 0.0, 0.0
    flops = training_flops(runner.chunks[0].config, runner.geometry, runner.vocab_size, batch)
    return batch.num_tokens, batch.padding_mask_BS.numel(), flops, float(bool(batch.lengths))


def _sent(runner: Runner, batches: Iterator[Batch | PlannedBatch]) -> Iterator[tuple[Batch, ModelInputs]]:
    """Each micro-batch, and this rank's part of it on its device."""
    rows: tuple[int, ...] = ()
    try:
        for coming in batches:
            rows = coming.rows
            yield send(coming, runner.mesh, runner.geometry)
            rows = ()
    except Exception as error:
        raise _failure(error, runner.mesh.rank, rows) from error


def _forward_step(
    runner: Runner, batches: Iterator[tuple[Batch, ModelInputs]], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    batch, inputs = next(batches)
    config = runner.chunks[0].config
    if config.num_moe_experts is not None:
        # megatron-core asks for it behind every forward pass. Within a global batch it never changes, so passes may overlap.
        config.moe_grad_scale_func = partial(auxiliary_scale, batch, runner.mesh.device)
    try:
        output = model(inputs)
    except Exception as error:
        raise _failure(error, runner.mesh.rank, batch.rows) from error
    return output, partial(weighted_loss, weights_N=inputs.weights_N, extent=_extent(runner, batch))


def auxiliary_scale(batch: Batch, device: torch.device) -> Tensor:
    """How often the router losses of a micro-batch count, where the gradient is divided by all labelled tokens: [1]."""
    scale = batch.num_labels if batch.mean_labels is None else batch.mean_labels
    return torch.full((1,), scale, device=device, dtype=torch.float32)  # filled on the device: a copy from the host would wait for it


def _failure(error: Exception, rank: int, rows: Sequence[int]) -> TrainingError:
    """What ends this rank, and with it the others. Where the error is not one for users, its traceback is shown."""
    if isinstance(error, SwiftcpError):
        return TrainingError(f"rank {rank}: {error}")
    if is_lost_contact(error):
        return LostContactError(f"rank {rank} lost contact with another rank: {error}")
    traceback.print_exception(error)
    where = f"data set rows {', '.join(map(str, rows))}" if rows else "reading data"
    return TrainingError(f"rank {rank} failed on {where}: {type(error).__name__}: {error}")


def run_micro_batches(
    runner: Runner, batches: Iterator[Batch | PlannedBatch], num_micro_batches: int, *, forward_only: bool = False
) -> Totals:
    """Forward (and backward) over this data-parallel rank's next micro-batches; gradients end up reduced and divided.

    Every rank must call it with the same `num_micro_batches`, and all ranks of a replica (its pipeline stages too) with the same batches.

    Raises:
        TrainingError: a micro-batch failed on this rank; names its rows.
    """
    if runner.reads_whole_steps:
        batches = _read_step(runner, batches, num_micro_batches)
    reports = run_schedule(
        partial(_forward_step, runner),
        _sent(runner, batches),
        runner.chunks,
        runner.mesh,
        num_micro_batches,
        forward_only=forward_only,
    )
    loss_sum, labelled, tokens, padded, flops, num_filled = _sum_over_ranks(reports, runner.mesh)
    return Totals(loss_sum, int(labelled), int(tokens), int(padded), flops, None if forward_only else _router_losses(runner, num_filled))


def _read_step[T](runner: Runner, batches: Iterator[T], num_micro_batches: int) -> Iterator[T]:
    try:
        return iter(list(itertools.islice(batches, num_micro_batches)))
    except Exception as error:
        raise _failure(error, runner.mesh.rank, ()) from error


def _router_losses(runner: Runner, num_micro_batches: float) -> tuple[float, ...] | None:
    """Means over all micro-batches that hold rows and all layers with experts."""
    config = runner.chunks[0].config
    if config.num_moe_experts is None or not trains_routers(config):
        return None
    sums = take_auxiliary_losses(runner.chunks, runner.mesh.device)
    dist.all_reduce(sums)
    return tuple((sums / max(sum(config.moe_layer_freq) * num_micro_batches, 1)).tolist())


def _sum_over_ranks(reports: Sequence[Report], mesh: Mesh) -> list[float]:
    """The loss sum, then each count. The last pipeline stage has the reports."""
    if mesh.is_last_stage:
        loss_sums, counts = zip(*reports, strict=True)
        summed_counts = torch.tensor([sum(of_batches) for of_batches in zip(*counts, strict=True)], dtype=torch.float64)
        totals = torch.cat([torch.stack(loss_sums).double().sum().view(1), summed_counts.to(mesh.device, non_blocking=True)])
    else:
        totals = torch.zeros(2 + NUM_EXTENTS, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(totals, group=mesh.dp_cp_group)
    return sum_over_stages(totals, mesh).tolist()


def _bad_gradient(runner: Runner) -> str:
    """The first parameter whose reduced gradient is not finite. Called on all ranks, for each may hold a part of the gradients."""
    trained = [(name, parameter) for chunk in runner.chunks for name, parameter in named_parameters(chunk) if parameter.requires_grad]
    bad = [index for index, (_, parameter) in enumerate(trained) if not cast(Any, parameter).main_grad.isfinite().all()]
    found = gather_all((runner.mesh.pp_rank, bad[0], trained[bad[0]][0]) if bad else None)
    return min(filter(None, found), default=(0, 0, "none, but their norm overflows"))[-1]


def optimizer_step(runner: Runner, optimizer: Any, scheduler: Any) -> float:
    """Clip, update the parameters and move the learning rate on.

    Where the gradient's norm is not finite (it is the same on every rank), nothing changes: parameters, moments and schedule.
    These are the parts of megatron-core's `optimizer.step()`, which would clip, and update, with a norm that is not finite.

    Returns:
        The gradient's norm before clipping.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        bad_gradient = _bad_gradient(runner)
        if runner.mesh.rank == 0:
            logger.warning("gradient norm %s: step skipped; first parameter that is not finite: %s", grad_norm, bad_gradient)
        return grad_norm
    if optimizer.config.clip_grad > 0:
        clip_grad_by_total_norm_fp32(
            optimizer.get_parameters(),
            optimizer.config.clip_grad,
            grad_norm,
            use_decoupled_grad=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
        )
    optimizer.step_with_ready_grads()
    scheduler.step(1)
    return grad_norm


def train_step(
    runner: Runner, optimizer: Any, scheduler: Any, batches: Iterator[Batch | PlannedBatch], num_micro_batches: int
) -> tuple[Totals, float]:
    """One global batch.

    Returns:
        The totals over all ranks, and the gradient's norm before clipping.
    """
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    totals = run_micro_batches(runner, batches, num_micro_batches)
    return totals, optimizer_step(runner, optimizer, scheduler)
