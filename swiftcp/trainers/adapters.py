"""LoRA in a run: adapters begun or read at the start, written or merged at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from swiftcp.checkpoint.adapter_folder import adapted_layers, fill_trained, read_adapter, write_adapter
from swiftcp.checkpoint.hf_reader import unwrap
from swiftcp.checkpoint.hf_writer import export_hf_folder
from swiftcp.checkpoint.name_table import NameTable
from swiftcp.checkpoint.together import gather_all
from swiftcp.config.concern import Concern
from swiftcp.config.concerns import FreezeConfig, RuntimeConfig
from swiftcp.config.tuner import AdapterConfig, AdapterFacts, TunerConfig, read_adapter_facts
from swiftcp.models.family import Family
from swiftcp.models.lora import adapted, merge_adapters
from swiftcp.models.lora_plan import LoraPlan, apply_plan, initialize_adapters, plan_from_config
from swiftcp.models.mm_gpt_model import MultimodalGPTModel, named_parameters
from swiftcp.parallel.mesh import Mesh

if TYPE_CHECKING:
    from swiftcp.trainers.setup import Source

logger = logging.getLogger(__name__)


def has_adapters(config: Concern) -> bool:
    """Whether a command's model has adapters."""
    return bool(isinstance(config, AdapterConfig) and config.adapters) or (isinstance(config, TunerConfig) and config.tuner_type == "lora")


def add_adapters(chunks: Sequence[MultimodalGPTModel], config: Concern, family: Family, table: NameTable, mesh: Mesh) -> None:
    """Attach the adapters of the folder that `adapters` names, or new ones as the recipe says, and freeze what is not trained.

    Called on all ranks, when the model has its weights.

    Raises:
        ConfigError: the recipe names layers that are not there.
        WeightsError: the adapters do not fit the model.
    """
    if isinstance(config, AdapterConfig) and config.adapters:
        facts = AdapterFacts.of(config) if isinstance(config, TunerConfig) else read_adapter_facts(Path(config.adapters))
        tensors = read_adapter(Path(config.adapters))
        apply_plan(LoraPlan(facts, *adapted_layers(tensors)), chunks, table, mesh)
        fill_trained(trained_parameters(chunks), tensors, Path(config.adapters), table, mesh.place)
        return
    assert isinstance(config, TunerConfig) and isinstance(config, FreezeConfig) and isinstance(config, RuntimeConfig)
    apply_plan(plan_from_config(config, config, chunks, table, family), chunks, table, mesh)
    initialize_adapters(chunks, table, config.seed, mesh.place)


def trained_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Factors and whole weights that are trained, by their names in the whole model."""
    return {name: parameter for chunk in chunks for name, parameter in named_parameters(chunk) if parameter.requires_grad}


def write_weights(chunks: Sequence[nn.Module], source: Source, mesh: Mesh, output: Path, *, merge: bool) -> None:
    """Write the model's weights as a Hugging Face folder; of a model with adapters the adapter alone, unless they are to be merged.

    Called on all ranks. Merged adapters are gone from the model.
    """
    table = source.family.name_table(source.hf_config)
    bare = [cast(MultimodalGPTModel, unwrap(chunk)) for chunk in chunks]
    layers = adapted(bare)
    own: AdapterFacts | None = layers[0].adapter.facts if layers else None  # type: ignore[union-attr,assignment]
    facts = next(filter(None, gather_all(own)), None)  # a pipeline stage may have no adapter
    if merge:
        logger.info("merged %d adapters on this rank", merge_adapters(bare))
    elif facts is not None:
        base = str(source.folder.resolve())
        write_adapter(trained_parameters(bare), output, table, mesh.place, device=mesh.device, facts=facts, base_model=base)
        return
    export_hf_folder(bare, source.folder, output, table, mesh.place)
