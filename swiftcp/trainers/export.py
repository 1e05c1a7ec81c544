"""`swiftcp export`: the weights of a run's checkpoint, of any layout, as a Hugging Face folder. Runs in each rank process."""

from __future__ import annotations

from pathlib import Path

import torch

from swiftcp.checkpoint.catalog import find_problems
from swiftcp.checkpoint.hf_writer import export_hf_folder
from swiftcp.checkpoint.run_state import RunState
from swiftcp.checkpoint.shards import read_shards
from swiftcp.config.export import ExportConfig
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.errors import CheckpointError, ConfigError
from swiftcp.models.build import build_chunks, transformer_config
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.mesh import stop
from swiftcp.trainers.setup import load_source, stage_fields, start_ranks


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
        dtype = getattr(torch, str(RunState.read(checkpoint).fingerprint["torch_dtype"]))
        settings = transformer_config(source.family, source.hf_config, mesh, dtype=dtype, backend="torch", **stage_fields(config))
        chunks = build_chunks(source.family, source.hf_config, settings, mesh, backend="torch")
        try:
            read_shards(checkpoint, chunks, None, mesh.dp_cp_group)
        except CheckpointError as error:
            raise ConfigError(f"{error}\nSet model to the folder that the run began from; {source_folder} describes another") from error
        table = source.family.name_table(source.hf_config)
        export_hf_folder(chunks, source_folder, Path(config.output), table, mesh.place)
    stop()
