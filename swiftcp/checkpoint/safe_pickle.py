"""Opens nothing that could run code: torch's distributed checkpoints keep their table of contents, and objects, as pickles.

`check_pickles` goes before megatron-core's loader, which unpickles both without a guard (torch 2.11).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from swiftcp.errors import CheckpointError

_CONTENTS_FILE = ".metadata"
_KNOWN = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class _ContentsUnpickler(pickle.Unpickler):
    """Knows the classes of a table of contents, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def check_pickles(checkpoint: Path) -> None:
    """Read all pickles of a distributed checkpoint with unpicklers that can build plain data and tensors only.

    Raises:
        CheckpointError: something else is in one of them, or it is damaged.
    """
    contents = checkpoint / _CONTENTS_FILE
    try:
        with contents.open("rb") as stream:
            metadata: Metadata = _ContentsUnpickler(stream).load()
        for index, entry in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                _check_object(checkpoint, entry)
    except Exception as error:  # a crafted pickle may raise anything
        raise CheckpointError(f"{contents}, or an object that it lists, is damaged or no plain data: {error}") from error


def _check_object(checkpoint: Path, entry: Any) -> None:
    """One pickled object inside a shard: torch's weights-only unpickler must know all of it."""
    if Path(entry.relative_path).name != entry.relative_path:
        raise pickle.UnpicklingError(f"it names {entry.relative_path}, outside of the checkpoint")
    with (checkpoint / entry.relative_path).open("rb") as stream:
        stream.seek(entry.offset)
        torch.load(io.BytesIO(stream.read(entry.length)), weights_only=True)
