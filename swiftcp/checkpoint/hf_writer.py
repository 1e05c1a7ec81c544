"""The model's weights, of any layout, as a Hugging Face folder like the one they came from: names, shapes, types and all other files.

What was not trained comes out equal to the bit, also where the model computes in a narrower type than the checkpoint stores.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from swiftcp.config.paths import INDEX_FILE, WEIGHTS_FILE, may_be_replaced
from swiftcp.errors import ConfigError, WeightsError
from swiftcp.failpoints import failpoint
from swiftcp.parallel.place import WHOLE, TensorPlace

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_FOLDERS = ("chat_templates", "additional_chat_templates")
_LICENSES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor to write, which one rank holds."""

    target: str
    """The parameter that the piece is a part of."""
    part: int
    """Which of the parts that the parameter is separated into."""
    rule: Rule
    """Between what the rank holds of the parameter, and its parts."""
    shape: tuple[int, ...]
    """Of the piece."""
    holder: int
    index: tuple[slice, ...]
    """Its place in the tensor; () for all of it."""


@dataclass(frozen=True)
class Entry:
    """One tensor to write, and where its parts are."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    """None where the tensor is no part of the model, and is carried over."""
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


def export_hf_folder(
    model: nn.Module | Sequence[nn.Module],
    source_folder: Path,
    output_folder: Path,
    table: NameTable,
    place: TensorPlace = WHOLE,
    *,
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
    held = gather_all((place, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}))
    with ExitStack() as stack:
        source, aside, entries = None, output_folder, []
        with together("exporting the weights"):
            if is_first_rank():
                _check_output(source_folder, output_folder)
                if any((source_folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
                    source = stack.enter_context(HFFolder(source_folder))
                entries = entries_of(held, source, table, _configured_dtype(source_folder))
                aside = stack.enter_context(new_folder(output_folder))
                copy_other_files(source_folder, aside)
        shards = from_first_rank(_plan(entries, max_shard_bytes))
        device = next(iter(tensors.values())).device
        for file, shard in shards.items():
            values = gather_entries(shard, tensors, device)
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
    if not may_be_replaced(output_folder):
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


Held = tuple[TensorPlace, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""A rank's place, and shape and type of each parameter that it holds."""


def _pieces(target: str, rule: Rule, shape: tuple[int, ...], holders: Mapping[int, int], size: int) -> Iterator[tuple[str, _Piece]]:
    """The pieces of one parameter, each with the name of the tensor that it goes into.

    Args:
        shape: of what a rank holds of the parameter.
        holders: the rank that has each tensor-parallel rank's part.
    """
    for tp_rank in range(1 if rule.parallel_dim is None else size):
        local = rule.local(shape, tp_rank, size)
        slices, shapes = rule.source_slices(shape, tp_rank, size), local.part_shapes(shape)
        for part, (name, index, of_part) in enumerate(zip(rule.sources, slices, shapes, strict=True)):
            yield name, _Piece(target, part, local, of_part, holders[tp_rank], index)


def entries_of(held: Sequence[Held], source: HFFolder | None, table: NameTable, dtype: torch.dtype | None) -> list[Entry]:
    """What to write, by name. Types are those of the source; without one, `dtype` or the parameter's."""
    parameters = {target: found for _, targets in held for target, found in targets.items()}
    table = table.suited(source.tensors) if source else table
    rules = table.pair(list(parameters))
    holders: dict[str, dict[int, int]] = {target: {} for target in parameters}
    for rank, (place, targets) in enumerate(held):
        for target in targets:
            holders[target].setdefault(place.of(is_expert=rules[target].is_expert)[0], rank)
    names = stored_names(source, {name for rule in rules.values() for name in rule.sources}, table) if source else {}
    entries: dict[str, Entry] = {}
    pieces: dict[str, dict[tuple[tuple[int, int], ...], _Piece]] = {}
    for target, rule in rules.items():
        shape, model_dtype = parameters[target]
        _, size = held[0][0].of(is_expert=rule.is_expert)
        for name, whole in zip(rule.sources, rule.source_shapes(rule.whole_shape(shape, size)), strict=True):
            entries.setdefault(name, Entry(name, whole, (), model_dtype, dtype or model_dtype, names.get(name)))
        for name, piece in _pieces(target, rule, shape, holders[target], size):
            # A tied copy of the parameter brings the same piece again.
            pieces.setdefault(name, {}).setdefault(tuple((part.start, part.stop) for part in piece.index), piece)
    entries = {name: replace(entry, pieces=tuple(pieces[name].values())) for name, entry in entries.items()}
    entries |= {copy: replace(entries[original], name=copy, stored=names[copy]) for copy, original in table.tied.items() if copy in names}
    if source is None:
        return [entries[name] for name in sorted(entries)]
    for stored, tensor in source.tensors.items():
        if table.is_carried(stored) and stored not in entries:
            entries[stored] = Entry(stored, tensor.shape, (), tensor.dtype, tensor.dtype, stored)
    different = sorted(set(names) ^ set(entries))
    if different:
        raise WeightsError(
            f"{source.folder} is not the folder that the model was read from: only one of them has {', '.join(different[:10])}"
        )
    return [replace(entries[name], dtype=source.tensors[names[name]].dtype) for name in sorted(entries)]


def _plan(entries: Sequence[Entry], max_shard_bytes: int) -> dict[str, list[Entry]]:
    """Fill shards in order; a tensor larger than the limit gets a shard of its own. File names are those of `save_pretrained`."""
    shards: list[list[Entry]] = [[]]
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


def gather_entries(shard: Sequence[Entry], tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The shard's tensors by name, on the first rank; others send what they hold. The first rank meets no error on the way."""
    if is_first_rank():
        return {entry.name: _collect(entry, tensors, device) for entry in shard if entry.pieces}
    rank, _ = rank_and_size()
    for piece in (piece for entry in shard for piece in entry.pieces if piece.holder == rank):
        dist.send(_own_piece(piece, tensors).contiguous(), 0)
    return {}


def _collect(entry: Entry, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One tensor on the host, in memory of its own."""
    whole = torch.empty(entry.shape, dtype=entry.model_dtype)
    for piece in entry.pieces:
        if piece.holder == 0:
            values = _own_piece(piece, tensors)
        else:
            values = torch.empty(piece.shape, dtype=entry.model_dtype, device=device)
            dist.recv(values, piece.holder)
        whole[piece.index] = values.cpu()
    return whole


def _own_piece(piece: _Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    return piece.rule.separate(tensors[piece.target].detach())[piece.part]


def _write_shard(file: Path, shard: Sequence[Entry], values: dict[str, Tensor], source: HFFolder | None) -> None:
    for entry in shard:
        if entry.pieces:
            values[entry.name] = _converted(values.pop(entry.name), entry, source)
        else:
            assert source is not None and entry.stored is not None
            values[entry.name] = source.read(entry.stored)
    save_file(values, file, metadata={"format": "pt"})
    file.chmod((file.parent / "config.json").stat().st_mode)  # safetensors lets the owner alone read it, whatever the umask says
    flush(file)
    failpoint("export.shard_written")


def _converted(value: Tensor, entry: Entry, source: HFFolder | None) -> Tensor:
    """In the type to be written.

    Where the model holds a narrower type than the source and the tensor is still the source's, it is the source's own.
    """
    if value.dtype == entry.dtype:
        return value
    if source is not None and entry.stored is not None:
        original = source.read(entry.stored)
        if original.shape != value.shape:
            original = original.transpose(-1, -2).contiguous()  # of experts, from an older checkpoint
        if torch.equal(original.to(value.dtype), value):
            return original
    return value.to(entry.dtype)


def _write_index(shards: Mapping[str, Sequence[Entry]], aside: Path) -> None:
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
