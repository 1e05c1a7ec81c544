"""Optimizer steps of the tiny model on the ranks of a pool, under any layout, on fixed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import Batch, collate_pack, collate_rows
from tests.samples import make_sample

PACK_ALIGN = 8


@dataclass(frozen=True)
class Pack:
    """One micro-batch: mixes of `samples.MIXES`, and the share of their text that has labels."""

    mixes: tuple[str, ...]
    labelled: float = 0.7


@dataclass(frozen=True)
class StepRecord:
    loss: float
    grad_norm: float
    labelled_tokens: int
    tokens: int


def train_config(folder: Path, **values: Any) -> Any:
    from swiftcp.config.concerns import TrainConfig

    fixed = dict(model=str(folder), dataset=["unused"], torch_dtype="float32", device="cpu", lr=1e-3, cp_partition_mode="zigzag")
    return TrainConfig(**{**fixed, **values})


def micro_batches(packs: Sequence[Pack], hf_config: Any, *, packing: bool = True, length_multiple: int = 1) -> list[Batch]:
    collate = collate_pack if packing else collate_rows
    batches = []
    for number, pack in enumerate(packs):
        samples = [make_sample(mix, hf_config, row=100 * number + i, labelled=pack.labelled) for i, mix in enumerate(pack.mixes)]
        batches.append(collate(samples, pack_align=PACK_ALIGN, pad_token_id=0, length_multiple=length_multiple))
    mean_labels = sum(batch.num_labels for batch in batches) / len(batches)
    return [replace(batch, mean_labels=mean_labels) for batch in batches]


class Training:
    """A model, its optimizer and schedule on this rank; use inside `cpu_mode()`."""

    def __init__(self, config: Any, **recompute: Any) -> None:
        from swiftcp.trainers.optimizer import build_optimizer, build_scheduler, wrap_model
        from swiftcp.trainers.setup import load_model, load_source, select_trained, start_ranks
        from swiftcp.trainers.step import Runner

        self.config, self.mesh = config, start_ranks(config)
        self.source = load_source(Path(config.model))
        self.chunks = load_model(config, self.source, self.mesh, checkpointed_tower=config.vit_gradient_checkpointing, **recompute)
        select_trained(self.chunks, config, self.source.family)
        self.wrapped = wrap_model(self.chunks, self.mesh, use_distributed_optimizer=bool(config.use_distributed_optimizer))
        self.runner = Runner(self.wrapped, self.mesh, self.source.geometry, self.chunks[0].vocab_size)
        self.optimizer = build_optimizer(self.wrapped, config, self.source.family)
        self.scheduler = build_scheduler(self.optimizer, config, train_iters=10)

    @property
    def model(self) -> Any:
        """The whole model, where a rank has it."""
        (model,) = self.chunks
        return model

    def micro_batches(self, packs: Sequence[Pack], *, packing: bool = True) -> list[Batch]:
        """All of a global batch."""
        from swiftcp.trainers.datasets import batch_layout

        multiple = batch_layout(self.config, self.mesh).length_multiple
        return micro_batches(packs, self.source.hf_config, packing=packing, length_multiple=multiple)

    def share(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        """This data-parallel rank's micro-batches of a global batch."""
        return iter(self.micro_batches(packs)[self.mesh.dp_rank :: self.mesh.dp_size])

    def step(self, packs: Sequence[Pack]) -> StepRecord:
        from swiftcp.trainers.step import train_step

        totals, grad_norm = train_step(self.runner, self.optimizer, self.scheduler, self.share(packs), len(packs) // self.mesh.dp_size)
        return StepRecord(totals.loss, grad_norm, totals.labelled_tokens, totals.tokens)

    def gradients(self, packs: Sequence[Pack]) -> dict[str, Tensor]:
        """Reduced gradients of the mean loss of a global batch, by parameter name."""
        from swiftcp.trainers.step import run_micro_batches

        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        run_micro_batches(self.runner, self.share(packs), len(packs) // self.mesh.dp_size)
        return {name: p.main_grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}


def run_steps(folder: Path, cp_size: int, global_batches: Sequence[Sequence[Pack]], values: dict[str, Any]) -> list[StepRecord]:
    """On each rank: one optimizer step a global batch."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, context_parallel_size=cp_size, **values))
        return [training.step(packs) for packs in global_batches]


def run_gradients(
    folder: Path, cp_size: int, packs: Sequence[Pack], values: dict[str, Any], recompute: Sequence[dict[str, Any]]
) -> list[dict[str, Tensor]]:
    """On each rank: the reduced gradients of one global batch, for each way of recomputation."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        config = train_config(folder, context_parallel_size=cp_size, **values)
        return [Training(config, **mode).gradients(packs) for mode in recompute]


def changed_parameters(folder: Path, packs: Sequence[Pack], values: dict[str, Any]) -> dict[str, bool]:
    """Of each parameter, by name, whether one optimizer step changes it."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **values))
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        training.step(packs)
        return {name: not torch.equal(before[name], p) for name, p in training.model.named_parameters()}


def step_with_nan_on_rank_1(folder: Path, packs: Sequence[Pack]) -> tuple[bool, bool, list[str]]:
    """(parameters and moments are unchanged, the schedule moved, warnings) of a step in which rank 1 had a NaN in its gradient."""
    from unittest import mock

    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers import step

    def state() -> list[Tensor]:
        moments = [value for s in training.optimizer.optimizer.state.values() for value in s.values()]
        return [tensor.detach().clone() for tensor in [*training.model.parameters(), *moments]]

    with cpu_mode():
        training = Training(train_config(folder))
        training.step(packs)
        before, steps = state(), training.scheduler.num_steps
        gain = training.model.language_model.decoder.final_layernorm.weight
        if training.mesh.rank == 1:
            gain.register_hook(lambda gradient: gradient * float("nan"))
        with mock.patch.object(step.logger, "warning") as warning:
            record = training.step(packs)
        assert math.isnan(record.grad_norm)
        warnings = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        return all(map(torch.equal, before, state())), training.scheduler.num_steps != steps, warnings


def broken_micro_batch(folder: Path) -> str:
    """The message of a micro-batch whose token ids are outside of the vocabulary."""
    from swiftcp.errors import TrainingError
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers.step import run_micro_batches

    with cpu_mode():
        training = Training(train_config(folder))
        samples = [make_sample("text", training.source.hf_config, row=row) for row in (40, 41)]
        batch = collate_pack(samples, pack_align=PACK_ALIGN, pad_token_id=10**6)
        try:
            run_micro_batches(training.runner, iter([batch]), 1)
        except TrainingError as error:
            return str(error)
    raise AssertionError("nothing was raised")


def parameters_by_decay(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters (name: dims) that decay, and those that do not."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, weight_decay=0.5))
        names = {p: name for name, p in training.model.named_parameters()}
        groups = training.optimizer.param_groups
        decayed = {names[p]: p.dim() for group in groups if group["weight_decay"] == 0.5 for p in group["params"]}
        spared = {names[p]: p.dim() for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
        assert len(decayed) + len(spared) == len(names)
        return decayed, spared


def peak_rates(folder: Path, **rates: float) -> dict[str, tuple[float, float]]:
    """(peak learning rate, its rate behind the second step of warm-up and decay) of every parameter."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, lr_warmup_iters=4, **rates))
        training.scheduler.step(2)
        names = {p: name for name, p in training.model.named_parameters()}
        groups = training.optimizer.param_groups
        return {names[p]: (group["max_lr"], group["lr"]) for group in groups for p in group["params"]}
