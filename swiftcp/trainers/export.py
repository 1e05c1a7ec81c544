"""`swiftcp export`: the weights of a run's checkpoint, of any layout, as a Hugging Face folder. Runs in each rank process.

Beside adapters a checkpoint holds what is trained alone: the rest is read from the model that the run began from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swiftcp.checkpoint.catalog import find_problems
from swiftcp.checkpoint.run_state import RunState
from swiftcp.checkpoint.shards import read_shards
from swiftcp.config.concerns import FreezeConfig, ModelConfig, ParallelConfig, TrainConfig
from swiftcp.config.export import ExportConfig
from swiftcp.config.keys import keys_of
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.tuner import AdapterConfig, TunerConfig
from swiftcp.errors import CheckpointError, ConfigError
from swiftcp.models.build import build_chunks, transformer_config
from swiftcp.models.mm_gpt_model import MultimodalGPTModel
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.mesh import Mesh, stop
from swiftcp.trainers.adapters import write_weights
from swiftcp.trainers.setup import Source, load_model, load_source, stage_fields, start_ranks


def run(resolved: ResolvedConfig[ExportConfig]) -> None:
    """Read the checkpoint's weights under the layout of this start, and write what the run's `hf` folder would hold.

    Raises:
        ConfigError: the checkpoint is damaged, or is not of a model like the one whose folder is given.
    """
    config = resolved.config
    checkpoint, source_folder = Path(config.checkpoint), Path(str(config.model))
    mesh = start_ranks(config)
    with cpu_shim.cpu_mode():
        if problems := find_problems(checkpoint):
            raise ConfigError("\n  ".join([f"checkpoint {checkpoint} is not whole, set another one:", *problems]))
        source = load_source(source_folder)
        recipe = RunState.read(checkpoint).fingerprint
        if recipe.get("tuner_type") == "lora":
            chunks = load_model(_as_begun(config, recipe), source, mesh)
        else:
            chunks = _without_weights(config, recipe, source, mesh)
        try:
            read_shards(checkpoint, chunks, None, mesh.dp_cp_group)
        except CheckpointError as error:
            raise ConfigError(f"{error}\nSet model to the folder that the run began from; {source_folder} describes another") from error
        write_weights(chunks, source, mesh, Path(config.output), merge=config.merge_lora)
    stop()


def _without_weights(config: ExportConfig, recipe: Mapping[str, Any], source: Source, mesh: Mesh) -> list[MultimodalGPTModel]:
    dtype = getattr(torch, str(recipe["torch_dtype"]))
    settings = transformer_config(source.family, source.hf_config, mesh, dtype=dtype, backend="torch", **stage_fields(config))
    return build_chunks(source.family, source.hf_config, settings, mesh, backend="torch")


def _as_begun(config: ExportConfig, recipe: Mapping[str, Any]) -> TrainConfig:
    """What the run began with, under the layout of this start."""
    layout = {key: getattr(config, key) for key in keys_of(ParallelConfig)}
    begun = {key: recipe[key] for kind in (ModelConfig, AdapterConfig, TunerConfig, FreezeConfig) for key in keys_of(kind) if key in recipe}
    return TrainConfig(**{**begun, **layout, "dataset": [""], "seed": recipe["seed"], "attention_backend": "torch"})
