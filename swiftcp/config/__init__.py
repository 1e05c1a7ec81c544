"""Configuration: what can be set, where values come from, and which of them fit together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftcp.config.checks import find_problems, find_warnings
from swiftcp.config.concerns import (
    CheckpointConfig,
    Concern,
    DataConfig,
    FreezeConfig,
    LoggingConfig,
    LogprobsConfig,
    LogprobsOutputConfig,
    MediaConfig,
    ModeConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ParallelConfig,
    ParityConfig,
    RecomputeConfig,
    RuntimeConfig,
    TrainConfig,
    TrainingConfig,
    TrainingMode,
    ValidationDataConfig,
)
from swiftcp.config.defaults import fill_defaults
from swiftcp.config.machine import Machine
from swiftcp.config.model_folder import ModelFacts, read_model_facts
from swiftcp.config.origin import Origin
from swiftcp.config.paths import split_row_limit
from swiftcp.config.problems import raise_all
from swiftcp.config.resolve import resolve
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.secrets import mask
from swiftcp.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "Concern",
    "DataConfig",
    "FreezeConfig",
    "LoggingConfig",
    "LogprobsConfig",
    "LogprobsOutputConfig",
    "Machine",
    "MediaConfig",
    "ModeConfig",
    "ModelConfig",
    "ModelFacts",
    "OptimizerConfig",
    "Origin",
    "PackingConfig",
    "ParallelConfig",
    "ParityConfig",
    "RecomputeConfig",
    "ResolvedConfig",
    "RuntimeConfig",
    "TrainConfig",
    "TrainingConfig",
    "TrainingMode",
    "ValidationDataConfig",
    "mask",
    "resolve",
    "split_row_limit",
    "validate",
]


def _derived(config: Concern, world_size: int) -> tuple[str, ...]:
    """Lines about what follows from the values; the configuration must be valid."""
    assert isinstance(config, ParallelConfig)
    cp = config.context_parallel_size
    dp = world_size // cp
    lines = [f"world {world_size} = cp {cp} x dp {dp}"]
    if isinstance(config, TrainingConfig) and isinstance(config, PackingConfig):
        unit = f"packs of {config.packing_length} tokens" if config.packing else "rows"
        num_micro_batches = config.global_batch_size // (config.micro_batch_size * dp)
        lines.append(
            f"step: {config.global_batch_size} {unit} = micro_batch_size {config.micro_batch_size} x dp {dp} x "
            f"{num_micro_batches} micro-batches of each rank"
        )
    return tuple(lines)


def validate[C: Concern](resolved: ResolvedConfig[C], machine: Machine) -> ResolvedConfig[C]:
    """Fill in the defaults that depend on model and machine, and check every rule across keys.

    Raises:
        ConfigError: rules are broken; all of them in one error.
    """
    assert isinstance(resolved.config, ModelConfig)
    facts: ModelFacts | None = None
    problems: list[str] = []
    try:
        facts = read_model_facts(Path(resolved.config.model))
    except ConfigError as error:
        problems.append(f"{error} [{resolved.origins['model']}]")
    full = fill_defaults(resolved, machine, facts)
    raise_all([*problems, *find_problems(full, machine, facts)])
    warnings = (*full.warnings, *find_warnings(full, machine, facts))
    return replace(full, warnings=warnings, derived=_derived(full.config, machine.world_size))
