"""Defaults that depend on the model or the machine. The keys' help texts promise them; a rule for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from swiftcp.config.concerns import (
    CheckpointConfig,
    Concern,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    RecomputeConfig,
    RuntimeConfig,
    TrainingConfig,
)
from swiftcp.config.facts import Machine, ModelFacts, has_tensorboard, has_transformer_engine
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.tuner_checks import tuner_defaults

PART_RATES = {"vit_lr": "freeze_vit", "aligner_lr": "freeze_aligner"}
"""Learning rates of parts, each with the key that freezes the part."""
MISSING_TENSORBOARD = "tensorboard is not installed (pip install 'swiftcp[trackers]')"
_MOST_WORKERS = 4
Default = tuple[str, object, str]
"""Key, value, and why."""


def _on_device(config: Concern, machine: Machine) -> Iterator[Default]:
    assert isinstance(config, RuntimeConfig)
    on_cuda = config.device == "cuda" or (config.device == "auto" and machine.num_gpus > 0)
    device = "cuda" if on_cuda else "cpu"
    if config.device == "auto":
        yield "device", device, f"{machine.num_gpus} GPUs found"
    if config.nproc_per_node is None:
        yield "nproc_per_node", machine.local_world_size, "every GPU" if on_cuda else "ranks of this machine"
    if isinstance(config, ModelConfig) and config.torch_dtype is None:
        yield "torch_dtype", "bfloat16" if on_cuda else "float32", f"device is {device}"
    if isinstance(config, OptimizerConfig) and config.use_distributed_optimizer is None:
        with_te = on_cuda and has_transformer_engine()
        yield "use_distributed_optimizer", with_te, f"device is {device}, with{'' if with_te else 'out'} Transformer Engine"


def _lengths(config: Concern, facts: ModelFacts | None) -> Iterator[Default]:
    if not isinstance(config, DataConfig) or not isinstance(config, PackingConfig) or facts is None:
        return
    max_length = config.max_length
    if max_length is None:
        why = "max_position_embeddings of the model"
        max_length = facts.max_position_embeddings // config.pack_align * config.pack_align
        if config.packing and config.packing_length is not None and config.packing_length < max_length:
            why, max_length = "packing_length", config.packing_length
        yield "max_length", max_length, why
    if config.packing and config.packing_length is None:
        yield "packing_length", max_length, "max_length"


def _num_workers(config: Concern, machine: Machine) -> Iterator[Default]:
    if isinstance(config, DataConfig) and config.dataloader_num_workers is None:
        assert isinstance(config, RuntimeConfig)
        if config.device == "cpu" or (config.device == "auto" and machine.num_gpus == 0):
            yield "dataloader_num_workers", 0, "on a CPU the ranks need every core"
            return
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_workers = max(1, min(_MOST_WORKERS, cores // machine.local_world_size))
        yield "dataloader_num_workers", num_workers, f"{cores} cores, {machine.local_world_size} ranks"


def _training(config: Concern) -> Iterator[Default]:
    if isinstance(config, TrainingConfig) and config.num_train_epochs is None and config.train_iters is None:
        yield "num_train_epochs", 1, "train_iters is not given"
    if isinstance(config, OptimizerConfig):
        yield from ((key, config.lr, "lr") for key in PART_RATES if getattr(config, key) is None)
    if isinstance(config, LoggingConfig) and config.report_to is None:
        yield "report_to", *((["tensorboard"], "tensorboard is installed") if has_tensorboard() else (["none"], MISSING_TENSORBOARD))
    if isinstance(config, LoggingConfig) and isinstance(config, CheckpointConfig) and config.eval_steps is None:
        yield "eval_steps", config.save_steps, "save_steps"
    if isinstance(config, CheckpointConfig) and isinstance(config, ModelConfig) and config.output_dir is None:
        yield "output_dir", f"swiftcp_output/{Path(config.model).resolve().name}", "the model folder's name"


def _recompute(config: Concern) -> Iterator[Default]:
    if not isinstance(config, RecomputeConfig):
        return
    if config.recompute_granularity == "selective" and config.recompute_modules is None:
        yield "recompute_modules", ["core_attn"], "recompute_granularity is selective"
    if config.recompute_granularity != "full":
        return
    if config.recompute_method is None:
        yield "recompute_method", "uniform", "recompute_granularity is full"
    if config.recompute_num_layers is None and config.recompute_method != "block":
        yield "recompute_num_layers", 1, "every layer"


def fill_defaults[C: Concern](resolved: ResolvedConfig[C], machine: Machine, facts: ModelFacts | None) -> ResolvedConfig[C]:
    """Replace each None that stands for "depends" by what it means here. Without facts, lengths stay open."""
    resolved = resolved.with_defaults({name: (value, why) for name, value, why in tuner_defaults(resolved)})
    config = resolved.config
    found = [
        *_on_device(config, machine),
        *_lengths(config, facts),
        *_num_workers(config, machine),
        *_training(config),
        *_recompute(config),
    ]
    return resolved.with_defaults({name: (value, why) for name, value, why in found})
