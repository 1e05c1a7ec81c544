"""Weights from a Hugging Face folder into the model: tensor by tensor, and either whole or an error that names what is wrong.

Nothing is ever left at its random value, and only safetensors are read: a pickle runs code when it is opened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from swiftcp.checkpoint.name_table import NameTable, Rule
from swiftcp.checkpoint.together import gather_all
from swiftcp.config.paths import INDEX_FILE, WEIGHTS_FILE
from swiftcp.errors import WeightsError
from swiftcp.parallel.place import WHOLE, TensorPlace

logger = logging.getLogger(__name__)

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_NAMES_SHOWN = 10


@dataclass(frozen=True)
class StoredTensor:
    """What a shard's header says of one tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class HFFolder:
    """The tensors of a folder's safetensors, read one by one from memory-mapped files. A context manager.

    Raises:
        WeightsError: there are no safetensors, or the index, a shard or a data type cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._shards: dict[Path, Any] = {}
        for file in weight_files(folder):
            shard = self._shards[file] = _open_shard(file)
            for name in shard.keys():  # noqa: SIM118 (a handle, not a dict)
                if name in self.tensors:
                    raise WeightsError(f"{folder}: {name} is stored twice, in {self.tensors[name].file.name} and {file.name}")
                self.tensors[name] = _header(shard, name, file)
        _check_index(folder, self.tensors)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """One tensor, or the part of it that `index` says, on the host; no other part is read from the disk."""
        shard = self._shards[self.tensors[name].file]
        return shard.get_slice(name)[index] if index else shard.get_tensor(name)

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._shards.clear()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's model, by the names that `transformers` looks for.

    Raises:
        WeightsError: the folder does not exist or has none; it has pickles alone; the index names a file that is not there.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder: model must name a folder with {WEIGHTS_FILE} or {INDEX_FILE}")
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        remedy = f"; it has {_some(pickles)}, but pickles run code and are not read: convert them to safetensors" if pickles else ""
        raise WeightsError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{remedy}")
    names = sorted(set(_weight_map(folder).values()))
    outside = [name for name in names if Path(name).name != name]
    absent = [name for name in names if not (folder / name).is_file()]
    if outside or absent:
        raise WeightsError(f"{folder / INDEX_FILE} names files that are not in the folder: {_some(outside or absent)}")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds each tensor, from the index."""
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / INDEX_FILE} has no weight_map of names and files: {error}") from error


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if (folder / WEIGHTS_FILE).is_file():
        return
    absent = [f"{name} ({file})" for name, file in _weight_map(folder).items() if name not in tensors]
    if absent:
        raise WeightsError(f"{folder / INDEX_FILE} lists tensors that the files do not hold: {_some(absent)}")


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged or cut short: {error}") from error


def _header(shard: Any, name: str, file: Path) -> StoredTensor:
    header = shard.get_slice(name)
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise WeightsError(f"{file}: {name} is stored as {header.get_dtype()}; only {', '.join(_DTYPES)} can be trained")
    return StoredTensor(file, dtype, tuple(header.get_shape()))


def _some(names: Iterable[str]) -> str:
    """Names for a message: the first few, and how many more."""
    names = list(names)
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model, without DDP and megatron-core's precision module."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def model_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    """Every parameter and saved buffer by its name in the bare model, whatever wraps it.

    Args:
        model: or the chunks of it that this rank's pipeline stage has, which tell their `global_name`s.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in map(unwrap, [model] if isinstance(model, nn.Module) else model):
        global_name = cast(Callable[[str], str], getattr(chunk, "global_name", str))
        state = chunk.state_dict(keep_vars=True)
        tensors |= {
            global_name(name): value for name, value in state.items() if isinstance(value, Tensor) and not name.endswith("_extra_state")
        }
    return tensors


def stored_names(source: HFFolder, expected: set[str], table: NameTable) -> dict[str, str]:
    """{name in the table: name in the folder} for all the folder's tensors, older layouts included; `expected` are the whole model's."""
    names: dict[str, str] = {}
    for stored in source.tensors:
        name = table.canonical_name(stored, expected)
        if name in names:
            raise WeightsError(f"{source.folder}: {names[name]} and {stored} are the same tensor under two names: delete one")
        names[name] = stored
    for copy, original in table.tied.items():
        if original not in names and copy in names:
            names[original] = names.pop(copy)
    return names


def load_hf_folder(model: nn.Module | Sequence[nn.Module], folder: Path, table: NameTable, place: TensorPlace = WHOLE) -> None:
    """Fill all of the model from `folder`, each tensor cast to the type of its parameter; no more than one in memory at a time.

    Called on all ranks, each with its pipeline stage's chunks: a rank reads its own parts alone, and together they need what the
    folder must hold.

    Raises:
        WeightsError: tensors are missing, unexpected or of another shape, or copies that should be tied differ; all are listed.
    """
    targets = model_tensors(model)
    with HFFolder(folder) as source:
        table = table.suited(source.tensors)
        rules = table.pair(list(targets))
        own = {name: needed for target, rule in rules.items() for name, needed in _whole_sources(rule, targets[target].shape, place)}
        needed = {name: of_name for of_rank in gather_all(own) for name, of_name in of_rank.items()}
        names = stored_names(source, set(needed), table)
        _check(source, names, needed, table)
        logger.info("reading %d tensors from %s", len(source.tensors), folder)
        with torch.no_grad():
            for target, rule in rules.items():
                shape = targets[target].shape
                rank, size = place.of(is_expert=rule.is_expert)
                slices = rule.source_slices(shape, rank, size)
                parts = [_read_part(source, names[name], own[name], index) for name, index in zip(rule.sources, slices, strict=True)]
                targets[target].copy_(rule.local(shape, rank, size).join(parts, shape))


_Needed = tuple[tuple[int, ...], bool]
"""Shape of a source, and whether older checkpoints have its last two dims swapped."""


def _whole_sources(rule: Rule, shape: Sequence[int], place: TensorPlace) -> Iterator[tuple[str, _Needed]]:
    """What a parameter of which this rank holds `shape` needs, by name."""
    _, size = place.of(is_expert=rule.is_expert)
    for name, whole in zip(rule.sources, rule.source_shapes(rule.whole_shape(shape, size)), strict=True):
        yield name, (whole, rule.is_expert)


def _is_swapped(stored: tuple[int, ...], needed: _Needed) -> bool:
    shape, may_be_swapped = needed
    return may_be_swapped and stored != shape and stored == (*shape[:-2], *reversed(shape[-2:]))


def _read_part(source: HFFolder, stored: str, needed: _Needed, index: tuple[slice, ...]) -> Tensor:
    """The part of a tensor that `index` says, as today's checkpoints have it."""
    if not _is_swapped(source.tensors[stored].shape, needed):
        return source.read(stored, index)
    return source.read(stored, (*index[:-2], *reversed(index[-2:]))).transpose(-1, -2)


def _check(source: HFFolder, names: Mapping[str, str], needed: Mapping[str, _Needed], table: NameTable) -> None:
    """Compare what the folder holds with what the whole model needs, before any value is read."""
    copies = {copy: original for copy, original in table.tied.items() if copy in names}
    problems = {
        "missing": [name for name in needed if name not in names],
        "unexpected": [
            stored for name, stored in names.items() if name not in needed and name not in copies and not table.is_carried(name)
        ],
        "of another shape": [
            f"{names[name]} is {list(stored)}, the model needs {list(of_name[0])}"
            for name, of_name in needed.items()
            if name in names and (stored := source.tensors[names[name]].shape) != of_name[0] and not _is_swapped(stored, of_name)
        ],
        "tied by config.json but stored with other values": [
            f"{names[copy]} against {names[original]} (set tie_word_embeddings to false, or delete the copy)"
            for copy, original in copies.items()
            if not torch.equal(source.read(names[copy]), source.read(names[original]))
        ],
    }
    lines = [f"  {len(found)} {kind}: {_some(found)}" for kind, found in problems.items() if found]
    if lines:
        remedy = "Use the config.json and the safetensors of one and the same model; nothing is initialised at random."
        raise WeightsError("\n".join([f"{source.folder} does not hold the model that its config.json describes:", *lines, remedy]))
