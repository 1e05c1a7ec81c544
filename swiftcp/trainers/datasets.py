"""Data sets as all ranks see them: the first rank looks at every row, and all get the same rows or the same error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from swiftcp.config.concerns import TrainConfig
from swiftcp.data.dataset import EncodedDataset, RowScan, load_dataset, scan_rows
from swiftcp.data.encode import Mode, RowEncoder
from swiftcp.data.loader import BatchLayout
from swiftcp.data.media import MediaAccess
from swiftcp.data.row_files import read_rows
from swiftcp.data.scan_cache import ScanCache, cache_folder
from swiftcp.data.visuals import MediaLimits
from swiftcp.errors import SwiftcpError
from swiftcp.parallel.mesh import Mesh
from swiftcp.trainers.setup import RunConfig, Source

logger = logging.getLogger(__name__)

_STILL_SCANNING = "still scanning"
_SIGN_OF_LIFE_SECONDS = 60.0
"""The first rank tells the others that often that it is still at it: a collective that waits for long is given up."""


def make_encoder(config: RunConfig, mode: Mode, source: Source, mesh: Mesh) -> RowEncoder:
    """What makes samples; pipeline stages behind the first decode no media.

    Raises:
        ConfigError: media limits contradict each other, or the tokenizer is of no use.
    """
    return RowEncoder(
        source.processor,
        partial(source.family.position_ids, source.hf_config),
        mode=mode,
        max_length=config.max_length,
        truncation_strategy=config.truncation_strategy,
        loss_scale=config.loss_scale,
        limits=MediaLimits(**{field.name: getattr(config, field.name) for field in fields(MediaLimits)}),
        access=MediaAccess(
            allow_http=config.allow_http,
            max_image_pixels=config.max_image_pixels,
            media_root=Path(config.media_root) if config.media_root else None,
            timeout=config.media_timeout,
        ),
        decode_media=mesh.is_first_stage,
    )


def open_dataset(
    datasets: Sequence[str], encoder: RowEncoder, config: RunConfig, mesh: Mesh, *, check_media: bool = True
) -> EncodedDataset:
    """Called on all ranks.

    Args:
        check_media: decode every medium once, now.

    Raises:
        DataError: a data set cannot be read, or rows are bad; the same on every rank.
    """
    workers = config.dataloader_num_workers or 0

    def scan(alive: Callable[[], None]) -> RowScan:
        cache = ScanCache(cache_folder() / "scans", datasets, encoder.settings())
        return scan_rows(
            read_rows(datasets),
            encoder,
            check_media=check_media,
            num_workers=workers,
            cache=cache,
            progress=lambda done, total: _progress(done, total, alive),
        )

    return load_dataset(datasets, encoder, strict=config.strict, scan=_from_first_rank(scan, mesh), reports=mesh.rank == 0)


def _progress(done: int, total: int, alive: Callable[[], None]) -> None:
    alive()
    if done % 10_000 == 0:
        logger.info("looked at %d of %d rows", done, total)


def _from_first_rank[T](work: Callable[[Callable[[], None]], T], mesh: Mesh) -> T:
    """What `work(alive)` returns or raises on the first rank, on every rank; `work` calls `alive` again and again."""
    if mesh.rank != 0:
        while (message := _broadcast(None)) == _STILL_SCANNING:
            pass
    else:
        message = _result(work, mesh)
        _broadcast(message)
    result, error = message
    if error is not None:
        raise error
    return result


def _result[T](work: Callable[[Callable[[], None]], T], mesh: Mesh) -> tuple[T | None, SwiftcpError | None]:
    last = monotonic()

    def alive() -> None:
        nonlocal last
        if mesh.world_size > 1 and monotonic() - last > _SIGN_OF_LIFE_SECONDS:
            last = monotonic()
            _broadcast(_STILL_SCANNING)

    try:
        return work(alive), None
    except SwiftcpError as error:
        return None, error


def _broadcast(message: Any) -> Any:
    messages = [message]
    dist.broadcast_object_list(messages, src=0)
    return messages[0]


def batch_layout(config: RunConfig, mesh: Mesh) -> BatchLayout:
    """In training on a GPU packs are padded to their full length, so that shapes never vary; on a CPU, or over a few rows whose pack
    may be as long as the model allows, that would cost time and memory alone."""
    return BatchLayout(
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        micro_batch_size=config.micro_batch_size,
        packing_length=config.packing_length if config.packing else None,
        pack_align=config.pack_align,
        full_packs=isinstance(config, TrainConfig) and config.packing and mesh.device.type == "cuda",
        batch_multiple=mesh.pp_size if mesh.num_chunks > 1 else 1,
        length_multiple=mesh.cp_size * mesh.tp_size if mesh.sequence_parallel else 1,
    )
