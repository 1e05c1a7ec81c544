"""Optimizer steps of the tiny model on the ranks of a pool, under any layout, on fixed micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swiftcp.data.batch import Batch, collate_pack
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

    fixed = dict(model=str(folder), dataset=["unused"], torch_dtype="float32", device="cpu", lr=1e-3)
    return TrainConfig(**{**fixed, **values})


def micro_batches(packs: Sequence[Pack], hf_config: Any) -> list[Batch]:
    batches = []
    for number, pack in enumerate(packs):
        samples = [make_sample(mix, hf_config, row=100 * number + i, labelled=pack.labelled) for i, mix in enumerate(pack.mixes)]
        batches.append(collate_pack(samples, pack_align=PACK_ALIGN, pad_token_id=0))
    return batches


class Training:
    """A model, its optimizer and schedule on this rank; use inside `cpu_mode()`."""

    def __init__(self, config: Any, **recompute: Any) -> None:
        from swiftcp.models.build import freeze
        from swiftcp.trainers.optimizer import build_optimizer, build_scheduler, wrap_model
        from swiftcp.trainers.setup import load_model, load_source, start_ranks
        from swiftcp.trainers.step import Runner

        self.mesh = start_ranks(config)
        self.source = load_source(Path(config.model))
        self.model = load_model(config, self.source, self.mesh, checkpointed_tower=config.vit_gradient_checkpointing, **recompute)
        freeze(self.model, self.source.family, llm=config.freeze_llm, vit=config.freeze_vit, aligner=config.freeze_aligner)
        self.ddp = wrap_model(self.model, config, self.mesh)
        self.runner = Runner(self.ddp, self.mesh, self.source.geometry, self.model.vocab_size)
        self.optimizer = build_optimizer(self.ddp, config)
        self.scheduler = build_scheduler(self.optimizer, config, train_iters=10)

    def share(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        """This data-parallel rank's micro-batches of a global batch."""
        return iter(micro_batches(packs, self.source.hf_config)[self.mesh.dp_rank :: self.mesh.dp_size])

    def step(self, packs: Sequence[Pack]) -> StepRecord:
        from swiftcp.trainers.step import train_step

        totals, grad_norm = train_step(self.runner, self.optimizer, self.scheduler, self.share(packs), len(packs) // self.mesh.dp_size)
        return StepRecord(totals.loss, grad_norm, totals.labelled_tokens, totals.tokens)

    def gradients(self, packs: Sequence[Pack]) -> dict[str, Tensor]:
        """Reduced gradients of the mean loss of a global batch, by parameter name."""
        from swiftcp.trainers.step import run_micro_batches

        self.ddp.zero_grad_buffer()
        run_micro_batches(self.runner, self.share(packs), len(packs) // self.mesh.dp_size)
        return {name: p.main_grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}


def run_steps(folder: Path, cp_size: int, global_batches: Sequence[Sequence[Pack]], values: dict[str, Any]) -> list[StepRecord]:
    """On each rank: one optimizer step a global batch."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, context_parallel_size=cp_size, **values))
        return [training.step(packs) for packs in global_batches]


def run_gradients(
    folder: Path, cp_size: int, packs: Sequence[Pack], values: dict[str, Any], recompute: dict[str, Any]
) -> dict[str, Tensor]:
    """On each rank: the reduced gradients of one global batch."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, context_parallel_size=cp_size, **values), **recompute)
        return training.gradients(packs)
