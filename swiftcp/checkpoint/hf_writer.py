"""The model's weights, of any layout, as a Hugging Face folder like the one they came from: names, shapes, types and all other files.

What was not trained comes out equal to the bit, also where the model computes in a narrower type than the checkpoint stores.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from swiftcp.checkpoint.durable import flush, new_folder
from swiftcp.checkpoint.hf_reader import HFFolder, model_tensors, stored_names
from swiftcp.checkpoint.name_table import NameTable, Rule
from swiftcp.checkpoint.together import from_first_rank, gather_all, is_first_rank, rank_and_size, together
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
    """One tensor to write, and where its parts are."""

    name: str
    target: str
    """The parameter that it is made of, or is made of a part of."""
    part: int
    """Which of the tensors that the parameter is made of."""
    rule: Rule
    shape: tuple[int, ...]
    holders: tuple[int, ...]
    """Ranks that hold the parameter, by tensor-parallel rank; one where each has all of it."""
    local_shape: tuple[int, ...]
    """Of the parameter, on each of them."""
    model_dtype: torch.dtype
    dtype: torch.dtype
    stored: str | None
    """Its name in the source folder; None where that has no weights (the model began at random)."""

    @property
    def num_values(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize

    def part_rule(self, tp_rank: int) -> Rule:
        return self.rule.local(self.local_shape, tp_rank, len(self.holders))


def export_hf_folder(
    model: nn.Module | Sequence[nn.Module],
    source_folder: Path,
    output_folder: Path,
    table: NameTable,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `output_folder`, whole or not at all. Called on all ranks, each with its pipeline stage's chunks.

    The first rank writes. Parts that other ranks hold come to it tensor by tensor, and no more than a shard is in its memory.
    `source_folder` gives the key set, the types, and every file that is no weight, byte for byte.

    Raises:
        WeightsError: the source is not what the model was read from.
        ConfigError: `output_folder` is the source, or holds something else than a model.
        CheckpointError: the first rank failed (on the others).
    """
    tensors = model_tensors(model)
    held = gather_all((tp_rank, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}))
    with ExitStack() as stack:
        source, aside, entries = None, output_folder, []
        with together("exporting the weights"):
            if is_first_rank():
                _check_output(source_folder, output_folder)
                if any((source_folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
                    source = stack.enter_context(HFFolder(source_folder))
                entries = _entries(held, tp_size, source, table, _configured_dtype(source_folder))
                aside = stack.enter_context(new_folder(output_folder))
                copy_other_files(source_folder, aside)
        shards = from_first_rank(_plan(entries, max_shard_bytes))
        for file, shard in shards.items():
            values = _gather(shard, tensors)
            with together("exporting the weights"):
                if is_first_rank():
                    _write_shard(aside / file, shard, values, source)
            del values  # or two shards are in memory while the next one comes in
        with together("exporting the weights"):
            if is_first_rank():
                if len(shards) > 1:
                    _write_index(shards, aside)
                stack.close()  # gives the folder its name
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


_Held = tuple[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""A rank's place among tensor-parallel ranks, and shape and type of each parameter that it holds."""


def _entries(held: Sequence[_Held], tp_size: int, source: HFFolder | None, table: NameTable, dtype: torch.dtype | None) -> list[_Entry]:
    """What to write, by name. Types are those of the source; without one, `dtype` or the parameter's."""
    first_with = {(target, tp_rank): rank for rank, (tp_rank, targets) in reversed(list(enumerate(held))) for target in targets}
    parameters = {target: found for _, targets in held for target, found in targets.items()}
    rules = table.pair(list(parameters))
    names = stored_names(source, {name for rule in rules.values() for name in rule.sources}, table) if source else {}
    entries: dict[str, _Entry] = {}
    for target, rule in rules.items():
        local_shape, model_dtype = parameters[target]
        holders = tuple(first_with[target, tp_rank] for tp_rank in range(1 if rule.parallel_dim is None else tp_size))
        shapes = rule.source_shapes(rule.whole_shape(local_shape, tp_size))
        for part, (name, shape) in enumerate(zip(rule.sources, shapes, strict=True)):
            entry = _Entry(name, target, part, rule, shape, holders, local_shape, model_dtype, dtype or model_dtype, names.get(name))
            entries.setdefault(name, entry)
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


def _gather(shard: Sequence[_Entry], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shard's tensors by name, on the first rank; others send what they hold. The first rank meets no error on the way."""
    if is_first_rank():
        device = next(iter(tensors.values())).device
        return {entry.name: _collect(entry, tensors, device) for entry in shard}
    rank, _ = rank_and_size()
    for entry in shard:
        for tp_rank, holder in enumerate(entry.holders):
            if holder == rank:
                dist.send(_own_part(entry, tensors, tp_rank).contiguous(), 0)
    return {}


def _collect(entry: _Entry, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One tensor on the host, in memory of its own."""
    parts = []
    for tp_rank, holder in enumerate(entry.holders):
        if holder == 0:
            parts.append(_own_part(entry, tensors, tp_rank))
            continue
        shape = entry.part_rule(tp_rank).source_shapes(entry.local_shape)[entry.part]
        parts.append(torch.empty(shape, dtype=entry.model_dtype, device=device))
        dist.recv(parts[-1], holder)
    if len(parts) == 1:
        return parts[0].cpu().clone(memory_format=torch.contiguous_format)
    assert entry.rule.parallel_dim is not None
    return torch.cat(parts, entry.rule.parallel_dim).cpu()


def _own_part(entry: _Entry, tensors: Mapping[str, Tensor], tp_rank: int) -> Tensor:
    return entry.part_rule(tp_rank).separate(tensors[entry.target].detach())[entry.part]


def _write_shard(file: Path, shard: Sequence[_Entry], values: dict[str, Tensor], source: HFFolder | None) -> None:
    for entry in shard:
        values[entry.name] = _converted(values.pop(entry.name), entry, source)
    save_file(values, file, metadata={"format": "pt"})
    file.chmod((file.parent / "config.json").stat().st_mode)  # safetensors lets the owner alone read it, whatever the umask says
    flush(file)
    failpoint("export.shard_written")


def _converted(value: Tensor, entry: _Entry, source: HFFolder | None) -> Tensor:
    """In the type to be written.

    Where the model holds a narrower type than the source and the tensor is still the source's, it is the source's own.
    """
    if value.dtype == entry.dtype:
        return value
    if source is not None and entry.stored is not None:
        original = source.read(entry.stored)
        if torch.equal(original.to(value.dtype), value):
            return original
    return value.to(entry.dtype)


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
