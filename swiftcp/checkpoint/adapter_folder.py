"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with the names that PEFT gives on the `transformers` model.

Every tensor of a folder goes into the model, and every factor of the model comes out of the folder: exactly once, or nothing at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftcp.checkpoint.durable import flush, new_folder
from swiftcp.checkpoint.hf_writer import entries_of, gather_entries
from swiftcp.checkpoint.name_table import NameTable
from swiftcp.checkpoint.together import gather_all, is_first_rank, together
from swiftcp.config.paths import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, may_be_replaced
from swiftcp.config.tuner import AdapterFacts
from swiftcp.errors import ConfigError, WeightsError
from swiftcp.parallel.place import TensorPlace

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""
FACTORS = (".lora_A.weight", ".lora_B.weight")
_MAX_NAMES_SHOWN = 10


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """All tensors by the checkpoint's names.

    Raises:
        WeightsError: the file is damaged, or holds what PEFT would not write.
    """
    file = folder / ADAPTER_WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged or cut short: {error}") from error
    strange = [name for name in tensors if not name.startswith(PREFIX)]
    if strange:
        raise WeightsError(f"{file}: names must begin with {PREFIX}, but there is {strange[0]}: write the adapter again with PEFT")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def adapted_layers(tensors: Mapping[str, Tensor]) -> tuple[frozenset[str], frozenset[str]]:
    """The linear layers that have factors, and the tensors that are whole weights."""
    factors = {name for name in tensors if name.endswith(FACTORS)}
    layers = frozenset(name.removesuffix(suffix) for name in factors for suffix in FACTORS if name.endswith(suffix))
    return layers, frozenset(tensors.keys() - factors)


@torch.no_grad()
def fill_trained(trained: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path, table: NameTable, place: TensorPlace) -> None:
    """Set factors and whole weights, `trained` by their names in the model, to what a folder holds. Called on all ranks.

    Raises:
        WeightsError: tensors are missing, of another shape, or left over.
    """
    rules = table.pair(list(trained))
    own: dict[str, tuple[int, ...]] = {}
    for target, rule in rules.items():
        _, size = place.of(is_expert=rule.is_expert)
        own |= dict(zip(rule.sources, rule.source_shapes(rule.whole_shape(trained[target].shape, size)), strict=True))
    needed = {name: shape for of_rank in gather_all(own) for name, shape in of_rank.items()}
    _check(tensors, needed, folder)
    for target, rule in rules.items():
        shape = trained[target].shape
        rank, size = place.of(is_expert=rule.is_expert)
        parts = [tensors[name][index] for name, index in zip(rule.sources, rule.source_slices(shape, rank, size), strict=True)]
        trained[target].copy_(rule.local(shape, rank, size).join(parts, shape))


def _check(tensors: Mapping[str, Tensor], needed: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    problems = {
        "missing": sorted(needed.keys() - tensors.keys()),
        "of no layer of the model": sorted(tensors.keys() - needed.keys()),
        "of another shape": [
            f"{name} is {list(tensors[name].shape)}, the model needs {list(shape)}"
            for name, shape in needed.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    lines = [f"  {len(found)} {kind}: {', '.join(found[:_MAX_NAMES_SHOWN])}" for kind, found in problems.items() if found]
    if lines:
        raise WeightsError(
            "\n".join([f"adapters {folder} does not fit the model:", *lines, "Use the model that the adapter was made for."])
        )


def write_adapter(
    trained: Mapping[str, Tensor],
    output: Path,
    table: NameTable,
    place: TensorPlace,
    *,
    device: torch.device,
    facts: AdapterFacts,
    base_model: str,
) -> None:
    """Write `output`, whole or not at all. Called on all ranks, each with its own part of what is trained.

    Args:
        trained: factors and whole weights, by their names in the model.
        device: that ranks send tensors on.
        base_model: what adapter_config.json says that the adapter was made for.

    Raises:
        ConfigError: `output` holds something else than an adapter or a model.
        CheckpointError: the first rank failed (on the others).
    """
    held = gather_all((place, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in trained.items()}))
    with ExitStack() as stack:
        entries, aside = entries_of(held, None, table, None), output
        with together("exporting the adapter"):
            if is_first_rank():
                if not may_be_replaced(output):
                    raise ConfigError(f"{output} holds files that are no adapter: choose an empty or a new folder")
                aside = stack.enter_context(new_folder(output))
        values = gather_entries(entries, trained, device)
        with together("exporting the adapter"):
            if is_first_rank():
                _write(aside, values, facts, base_model)
                stack.close()  # gives the folder its name
                logger.info("wrote the adapter to %s", output)


def _write(aside: Path, values: Mapping[str, Tensor], facts: AdapterFacts, base_model: str) -> None:
    config = aside / ADAPTER_CONFIG_FILE
    config.write_text(json.dumps(_peft_config(list(values), facts, base_model), indent=2) + "\n", encoding="utf-8")
    flush(config)
    weights = aside / ADAPTER_WEIGHTS_FILE
    save_file({PREFIX + name: value.contiguous() for name, value in sorted(values.items())}, weights, metadata={"format": "pt"})
    weights.chmod(config.stat().st_mode)  # safetensors lets the owner alone read it, whatever the umask says
    flush(weights)


def _peft_config(names: Sequence[str], facts: AdapterFacts, base_model: str) -> dict[str, Any]:
    """adapter_config.json. Modules are listed one by one, by their whole names: shorter ones may match more than was trained."""
    layers = sorted({name.removesuffix(FACTORS[0]) for name in names if name.endswith(FACTORS[0])})
    whole = sorted({name.rpartition(".")[0] for name in names if not name.endswith(FACTORS)})
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": facts.rank,
        "lora_alpha": int(facts.alpha) if facts.alpha == int(facts.alpha) else facts.alpha,
        "lora_dropout": facts.dropout,
        "use_rslora": facts.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": layers,
        "modules_to_save": whole or None,
        "inference_mode": True,
    }
