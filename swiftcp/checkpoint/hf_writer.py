"""The model's weights as a Hugging Face folder like the one they came from: names, shapes, types and all other files.

What was not trained comes out equal to the bit, also where the model computes in a narrower type than the checkpoint stores.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swiftcp.checkpoint.durable import flush, new_folder
from swiftcp.checkpoint.hf_reader import HFFolder, model_tensors, stored_names
from swiftcp.checkpoint.name_table import NameTable, Rule
from swiftcp.checkpoint.together import is_first_rank, together
from swiftcp.config.paths import INDEX_FILE, WEIGHTS_FILE
from swiftcp.errors import ConfigError, WeightsError
from swiftcp.failpoints import failpoint

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_FOLDERS = ("chat_templates", "additional_chat_templates")
_LICENSES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class _Entry:
    """One tensor to write."""

    name: str
    parameter: Tensor
    rule: Rule
    part: int
    """Which of the tensors that the parameter is made of."""
    dtype: torch.dtype
    stored: str | None
    """Its name in the source folder; None where that has no weights (the model began at random)."""

    @property
    def num_values(self) -> int:
        return torch.Size(self.rule.source_shapes(self.parameter.shape)[self.part]).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


def export_hf_folder(
    model: nn.Module, source_folder: Path, output_folder: Path, table: NameTable, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `output_folder`, whole or not at all. Called on all ranks; the first writes, a shard at a time in memory.

    `source_folder` gives the key set, the types, and every file that is no weight, byte for byte.

    Raises:
        WeightsError: the source is not what the model was read from.
        ConfigError: `output_folder` is the source, or holds something else than a model.
        CheckpointError: the first rank failed (on the others).
    """
    with together("exporting the weights"):
        if is_first_rank():
            _check_output(source_folder, output_folder)
            has_weights = any((source_folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))
            with HFFolder(source_folder) if has_weights else nullcontext() as source, new_folder(output_folder) as aside:
                entries = _entries(model, source, table, _configured_dtype(source_folder))
                copy_other_files(source_folder, aside)
                _write_weights(entries, source, aside, max_shard_bytes)
            failpoint("export.published")
            logger.info("wrote the weights to %s", output_folder)


def _check_output(source_folder: Path, output_folder: Path) -> None:
    """Refuse to replace what no export can have written."""
    if output_folder.resolve() == source_folder.resolve():
        raise ConfigError(f"{output_folder} is the folder that the weights came from: choose another output")
    if output_folder.is_dir() and any(output_folder.iterdir()) and not (output_folder / "config.json").is_file():
        raise ConfigError(f"{output_folder} holds files that are no model: choose an empty or a new folder")


def copy_other_files(source_folder: Path, output_folder: Path) -> None:
    """Copy configuration, tokenizer, processor, chat template and licence as they are. Code and weights stay behind."""
    wanted = [
        path
        for path in source_folder.iterdir()
        if path.is_file() and (path.suffix in _COPIED_SUFFIXES or path.name.startswith(_LICENSES)) and not path.name.endswith(".index.json")
    ]
    wanted += [path for folder in _COPIED_FOLDERS for path in (source_folder / folder).glob("*.jinja")]
    for path in wanted:
        copy = output_folder / path.relative_to(source_folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        flush(copy)


def _configured_dtype(folder: Path) -> torch.dtype | None:
    """The type that config.json states; None if it states none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _entries(model: nn.Module, source: HFFolder | None, table: NameTable, dtype: torch.dtype | None) -> list[_Entry]:
    """What to write, by name. Types are those of the source; without one, `dtype` or the parameter's."""
    parameters = model_tensors(model)
    rules = table.pair(list(parameters))
    names = stored_names(source, rules, table) if source else {}
    entries: dict[str, _Entry] = {}
    for target, rule in rules.items():
        parameter = parameters[target]
        for part, name in enumerate(rule.sources):
            entries[name] = _Entry(name, parameter, rule, part, dtype or parameter.dtype, names.get(name))
    entries |= {copy: replace(entries[original], name=copy, stored=names[copy]) for copy, original in table.tied.items() if copy in names}
    if source is None:
        return [entries[name] for name in sorted(entries)]
    different = sorted(set(names) ^ set(entries))
    if different:
        raise WeightsError(
            f"{source.folder} is not the folder that the model was read from: only one of them has {', '.join(different[:10])}"
        )
    return [replace(entries[name], dtype=source.tensors[names[name]].dtype) for name in sorted(entries)]


def _plan(entries: Sequence[_Entry], max_shard_bytes: int) -> dict[str, list[_Entry]]:
    """Fill shards in order; a tensor larger than the limit gets a shard of its own. File names are those of `save_pretrained`."""
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)}


def _write_weights(entries: Sequence[_Entry], source: HFFolder | None, aside: Path, max_shard_bytes: int) -> None:
    shards = _plan(entries, max_shard_bytes)
    for file, shard in shards.items():
        save_file({entry.name: _value(entry, source) for entry in shard}, aside / file, metadata={"format": "pt"})
        flush(aside / file)
        failpoint("export.shard_written")
    if len(shards) > 1:
        _write_index(shards, aside)


def _value(entry: _Entry, source: HFFolder | None) -> Tensor:
    """The tensor on the host in its own memory, in the type to be written.

    Where the model holds a narrower type than the source and the tensor is still the source's, it is the source's own.
    """
    value = entry.rule.separate(entry.parameter.detach())[entry.part].cpu()
    if value.dtype == entry.dtype:
        return value.clone(memory_format=torch.contiguous_format)
    if source is not None and entry.stored is not None:
        original = source.read(entry.stored)
        if torch.equal(original.to(value.dtype), value):
            return original
    return value.to(entry.dtype).contiguous()


def _write_index(shards: Mapping[str, Sequence[_Entry]], aside: Path) -> None:
    entries = [entry for shard in shards.values() for entry in shard]
    index = {
        "metadata": {
            "total_parameters": sum(entry.num_values for entry in entries),
            "total_size": sum(entry.num_bytes for entry in entries),
        },
        "weight_map": {entry.name: file for file, shard in shards.items() for entry in shard},
    }
    (aside / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    flush(aside / INDEX_FILE)
