"""What every run on several ranks begins with: the ranks themselves, what the checkpoint folder says, the model with its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftcp.checkpoint.hf_reader import load_hf_folder
from swiftcp.config.bench import BenchConfig
from swiftcp.config.concerns import (
    LogprobsConfig,
    ParallelConfig,
    ParityConfig,
    RecomputeConfig,
    RouterConfig,
    RouterLossConfig,
    TrainConfig,
)
from swiftcp.config.export import ExportConfig
from swiftcp.config.secrets import mask
from swiftcp.errors import ConfigError
from swiftcp.models.build import build_chunks, freeze, transformer_config
from swiftcp.models.family import Family
from swiftcp.models.mm_gpt_model import MultimodalGPTModel
from swiftcp.models.registry import family_of
from swiftcp.models.towers import Geometry
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.layer_specs import Backend, select_backend
from swiftcp.parallel.mesh import Mesh, build_mesh, select_device, start_process_group
from swiftcp.trainers.adapters import add_adapters, has_adapters
from swiftcp.trainers.random_weights import initialize
from swiftcp.trainers.run_files import versions_of

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")


RunConfig = TrainConfig | LogprobsConfig | ParityConfig
"""Every command that builds a model has the keys of model, rows, layout and machine."""


@dataclass(frozen=True)
class Source:
    """What the checkpoint folder says, without its weights."""

    folder: Path
    family: Family
    hf_config: Any
    processor: Any
    """The checkpoint's own, with its tokenizer and chat template."""
    geometry: Geometry


_SEED_STEP = 1 << 20
"""Between the seeds of ranks with other tokens; megatron-core adds less than that for tensor- and expert-parallel ranks."""
PER_NODE_KEYS = frozenset({"nproc_per_node", "dataloader_num_workers", "report_to"})
"""Keys whose default may differ from node to node, and may do so."""


def _terms(config: RunConfig | BenchConfig | ExportConfig) -> dict[str, str]:
    """What nodes must agree on: the configuration, secrets masked, and the versions that decide what comes of it."""
    values = {key: mask(str(value)) for key, value in config.model_dump().items() if key not in PER_NODE_KEYS}
    versions = versions_of(("swiftcp", "torch", "megatron-core", "transformers"))
    return values | {f"version of {package}": version for package, version in versions.items()}


def start_ranks(config: RunConfig | BenchConfig | ExportConfig) -> Mesh:
    """Device, process group, mesh and seeds of this rank. What follows must run inside `cpu_shim.cpu_mode()`.

    Raises:
        ConfigError: no such device, or the ranks do not divide into replicas of the model.
    """
    device = select_device(config.device)
    if device.type == "cpu":
        cpu_shim.install()
    start_process_group(device, _terms(config))
    mesh = build_mesh(
        device,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        cp_partition_mode=config.cp_partition_mode,
        hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes if config.cp_comm_type == "a2a+p2p" else None,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )
    seed = config.seed + _SEED_STEP * mesh.dropout_place
    torch.manual_seed(seed)
    with cpu_shim.cpu_mode():
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return mesh


def load_source(folder: Path) -> Source:
    """Read the configuration and the processor of a checkpoint folder. No code of the folder runs.

    Raises:
        ConfigError: the folder's configuration or processor cannot be read, its family is not supported, or its tokenizer has tokens
            that the model lacks.
    """
    from transformers import AutoConfig, AutoProcessor

    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        family = family_of(hf_config.model_type)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(f"model {folder} holds no tokenizer ({' or '.join(TOKENIZER_FILES)}): copy the checkpoint's whole folder")
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model {folder} cannot be read: {error}") from error
    _check_vocabulary(folder, processor.tokenizer, family.vocab_size(hf_config))
    return Source(folder, family, hf_config, processor, family.tower_geometry(hf_config))


def _check_vocabulary(folder: Path, tokenizer: Any, vocab_size: int) -> None:
    """Tensor-parallel ranks would take what none of them holds for a token of zeros, and one rank would fail at the first such row."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ConfigError(
            f"model {folder}: its tokenizer has token {token!r} with id {largest}, but config.json says vocab_size {vocab_size}: use the "
            "tokenizer and the weights of one and the same model"
        )


def recompute_tower(chunks: Sequence[MultimodalGPTModel]) -> None:
    """Compute the layers of the towers of `transformers` again in the backward pass, in the chunk that has them."""
    for tower in (cast(Any, tower) for chunk in chunks for tower in chunk.towers.values()):
        tower.main_input_name = "hidden_states"  # transformers 5 takes it for a text model, and warns that it has no token embeddings
        tower.gradient_checkpointing_enable({"use_reentrant": False})


def recompute_fields(config: RecomputeConfig) -> dict[str, Any]:
    """megatron-core's names for what is computed again in the backward pass."""
    if config.recompute_granularity == "none":
        return {}
    if config.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": config.recompute_modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
    }


def cp_communication(config: ParallelConfig) -> dict[str, Any]:
    """How the ranks of a context-parallel group exchange keys and values, for `transformer_config`."""
    keys = ("cp_comm_type", "hierarchical_context_parallel_sizes")
    return {key: getattr(config, key) for key in keys}


def router_fields(config: RouterConfig) -> dict[str, Any]:
    """megatron-core's names for how routers compute, and for their losses, which training alone has."""
    fields: dict[str, Any] = {"moe_router_dtype": None if config.moe_router_dtype == "none" else config.moe_router_dtype}
    if isinstance(config, RouterLossConfig):
        fields |= {"moe_aux_loss_coeff": config.moe_aux_loss_coeff, "moe_z_loss_coeff": config.moe_z_loss_coeff}
    return fields


def stage_fields(config: ParallelConfig) -> dict[str, Any]:
    """megatron-core's names for pipeline stages of another number of layers."""
    return {
        "num_layers_in_first_pipeline_stage": config.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": config.decoder_last_pipeline_num_layers,
    }


def decoder_settings(
    config: RunConfig | BenchConfig, family: Family, hf_config: Any, mesh: Mesh, *, backend: Backend, recompute: Mapping[str, Any]
) -> TransformerConfig:
    """megatron-core's description of the decoder that a command's keys ask for; `recompute`: see `recompute_fields`."""
    return transformer_config(
        family,
        hf_config,
        mesh,
        dtype=getattr(torch, str(config.torch_dtype)),
        backend=backend,
        **cp_communication(config),
        **stage_fields(config),
        **router_fields(config),
        **recompute,
    )


def load_model(
    config: RunConfig, source: Source, mesh: Mesh, *, checkpointed_tower: bool = False, **recompute: Any
) -> list[MultimodalGPTModel]:
    """The model with the folder's weights, or with random ones where `init_from_config` says so: the chunks of this pipeline stage.

    Args:
        checkpointed_tower: compute the tower's layers again in the backward pass.
        recompute: megatron-core's `recompute_*` fields.

    Raises:
        ConfigError: the attention backend cannot be used.
        WeightsError: the folder does not hold exactly the model's weights.
    """
    backend = select_backend(config.attention_backend)
    settings = decoder_settings(config, source.family, source.hf_config, mesh, backend=backend, recompute=recompute)
    chunks = build_chunks(source.family, source.hf_config, settings, mesh, backend=backend, fuse_norms=not has_adapters(config))
    if checkpointed_tower:
        recompute_tower(chunks)
    table = source.family.name_table(source.hf_config)
    if config.init_from_config:
        initialize(chunks, table, source.hf_config, config.seed, place=mesh.place)
    else:
        load_hf_folder(chunks, source.folder, table, mesh.place)
    if has_adapters(config):
        add_adapters(chunks, config, source.family, table, mesh)
    return chunks


def select_trained(chunks: Sequence[MultimodalGPTModel], config: TrainConfig | BenchConfig, family: Family) -> None:
    """Exclude from training what the recipe freezes. Where there are adapters, `load_model` has frozen all but what is trained.

    Raises:
        ConfigError: nothing is left to train.
    """
    if not has_adapters(config):
        freeze(chunks, family, llm=config.freeze_llm, vit=config.freeze_vit, aligner=config.freeze_aligner)
