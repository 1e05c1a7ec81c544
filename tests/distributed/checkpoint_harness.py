"""Runs of the tiny model that save and resume: a loop like the trainer's, small enough to be killed many times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.training_harness import Pack, Training, train_config

PACKS = (
    (Pack(("image", "text")), Pack(("video",))),
    (Pack(("text", "seven_tokens")), Pack(("three_images",))),
    (Pack(("big_image",)), Pack(("one_token", "text"))),
)
VIT_LR = 3e-4


@dataclass(frozen=True)
class Recipe:
    """What a start of the run is given, apart from the folders."""

    cp_size: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    """Keys of the training configuration."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Keys that do not change the result."""
    two_learning_rates: bool = False
    save_steps: int = 2
    save_total_limit: int | None = None
    async_save: bool = False
    with_optimizer: bool = True
    """Whether checkpoints hold the optimizer's state, and whether it is read from them."""
    eval_losses: tuple[float | None, ...] = ()
    """What an evaluation behind each step would have found."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {**self.values, "two_learning_rates": self.two_learning_rates}


@dataclass(frozen=True)
class Record:
    """All that a step shows; floats as hexadecimal text, so that equal means equal to the bit."""

    step: int
    loss: str
    grad_norm: str
    learning_rates: tuple[str, ...]
    weight_decays: tuple[float, ...]
    draws: tuple[float, ...]
    """One number of each source of random numbers."""


def _draws() -> tuple[float, ...]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(1).item()
    return random.random(), float(np.random.rand()), torch.rand(1).item(), tracked


def _with_two_learning_rates(training: Training, config: Any) -> None:
    """Give the tower a learning rate of its own."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey

    from swiftcp.trainers.optimizer import build_scheduler

    settings = OptimizerConfig(optimizer="adam", lr=config.lr, min_lr=0.0, weight_decay=config.weight_decay, clip_grad=1.0)
    overrides = {ParamKey(name="*visual*"): {"max_lr": VIT_LR, "min_lr": 0.0}}
    training.optimizer = get_megatron_optimizer(settings, training.wrapped, config_overrides=overrides, use_gloo_process_groups=False)
    training.scheduler = build_scheduler(training.optimizer, config, train_iters=10)


def _start(folder: Path, recipe: Recipe) -> Training:
    random.seed(0)
    np.random.seed(0)
    config = train_config(folder, context_parallel_size=recipe.cp_size, **recipe.values, **recipe.layout)
    training = Training(config)
    if recipe.two_learning_rates:
        _with_two_learning_rates(training, config)
    return training


def _step(training: Training, step: int) -> Record:
    done = training.step(PACKS[step % len(PACKS)])
    groups = training.optimizer.param_groups
    return Record(
        step=step + 1,
        loss=done.loss.hex(),
        grad_norm=done.grad_norm.hex(),
        learning_rates=tuple(group["lr"].hex() for group in groups),
        weight_decays=tuple(group["weight_decay"] for group in groups),
        draws=_draws(),
    )


def run(folder: Path, output_dir: Path, until: int, recipe: Recipe) -> list[Record]:
    """On each rank: resume from the newest checkpoint if there is one, train until step `until`, save every `save_steps`."""
    from swiftcp.checkpoint.catalog import find_latest
    from swiftcp.checkpoint.resumable import Saver, load_checkpoint
    from swiftcp.checkpoint.run_state import RunState
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = _start(folder, recipe)
        parts = (training.wrapped, training.optimizer, training.scheduler)
        group = training.mesh.dp_cp_group
        saver = Saver(
            output_dir,
            *parts,
            dp_cp_group=group,
            save_total_limit=recipe.save_total_limit,
            with_optimizer=recipe.with_optimizer,
            in_background=recipe.async_save,
        )
        latest = find_latest(output_dir)
        first = 0
        if latest is not None:
            loading = dict(dp_cp_group=group, fingerprint=recipe.fingerprint, with_optimizer=recipe.with_optimizer)
            first = load_checkpoint(latest, *parts, **loading).step
        records = []
        for step in range(first, until):
            records.append(_step(training, step))
            saver.poll()
            if (step + 1) % recipe.save_steps == 0:
                eval_loss = recipe.eval_losses[step] if recipe.eval_losses else None
                saver.save(RunState(step + 1, 0, step + 1, 0, 0, 0, "plan", recipe.fingerprint, eval_loss=eval_loss))
        saver.wait()
        return records
