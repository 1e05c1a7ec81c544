"""`swiftcp logprobs`: the log-probability of every token of a data set, under any layout.

Every token is made a label, so that the head and the loss are those of training: what is written is the negative of the losses
that training would see.

Legend: T tokens of a micro-batch's full stream, L tokens of a sample.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swiftcp.checkpoint.durable import UNFINISHED, flush
from swiftcp.config.concerns import LogprobsConfig
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.data.batch import Batch, Sample
from swiftcp.data.dataset import EncodedDataset
from swiftcp.data.loader import BatchLayout
from swiftcp.data.plan import Pack
from swiftcp.data.workers import map_in_order
from swiftcp.models.inputs import ModelInputs, make_inputs
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.mesh import Mesh, stop
from swiftcp.parallel.pipeline import run_schedule, sum_over_stages
from swiftcp.trainers.datasets import batch_layout, make_encoder, open_dataset
from swiftcp.trainers.setup import Source, load_model, load_source, start_ranks

logger = logging.getLogger(__name__)


def run(resolved: ResolvedConfig[LogprobsConfig]) -> None:
    """Run in each rank process; the first rank writes `output`, whole or not at all.

    Raises:
        SwiftcpError: recipe, data or weights are wrong.
    """
    config = resolved.config
    mesh = start_ranks(config)
    with cpu_shim.cpu_mode():
        source = load_source(Path(config.model))
        dataset = open_dataset(config.dataset, make_encoder(config, config.mode, source, mesh), config, mesh)
        chunks = [chunk.eval() for chunk in load_model(config, source, mesh)]
        write_logprobs(Path(config.output), chunks, dataset, batch_layout(config, mesh), source, mesh, config.dataloader_num_workers or 0)
    stop()


class _EveryTokenLabelled:
    """A micro-batch in which each token is to be predicted, and the samples as they were; runs in worker processes."""

    def __init__(self, dataset: EncodedDataset, layout: BatchLayout) -> None:
        self._dataset, self._layout = dataset, layout

    def __call__(self, packs: tuple[Pack, ...]) -> tuple[Batch, list[dict[str, Any]]]:
        samples = [self._dataset[place] for pack in packs for place in pack]
        labelled = [replace(sample, labels_L=sample.input_ids_L, weights_L=torch.ones(len(sample))) for sample in samples]
        return self._layout.collate(labelled, self._dataset.encoder.pad_token_id), [_record(sample) for sample in samples]


def _record(sample: Sample) -> dict[str, Any]:
    return {"row": sample.row, "input_ids": sample.input_ids_L.tolist(), "labels": sample.labels_L.tolist()}


def _forward_step(coming: Iterator[tuple[ModelInputs, Tensor]], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    inputs, stream_T = next(coming)

    def fill(losses_N: Tensor) -> tuple[Tensor, int, None]:
        stream_T[inputs.label_positions_N.to(stream_T.device)] = -losses_N.float()
        return losses_N.sum(), inputs.num_labels, None

    return chunk(inputs), fill


@torch.no_grad()
def token_logprobs(chunks: Sequence[nn.Module], batches: Sequence[Batch], source: Source, mesh: Mesh) -> list[Tensor]:
    """Log-probability of the label of each token of each full stream, [T] float32 on the host; 0 where there is no label.

    Called on all ranks of a replica, its pipeline stages too, with the same micro-batches; all get the whole.
    """
    streams = [torch.zeros(batch.input_ids_BS.numel(), device=mesh.device) for batch in batches]
    inputs = (make_inputs(batch, mesh, source.geometry) for batch in batches)
    run_schedule(_forward_step, zip(inputs, streams, strict=True), chunks, mesh, len(batches), forward_only=True)
    for stream_T in streams:
        dist.all_reduce(stream_T, group=mesh.cp_group)
        sum_over_stages(stream_T, mesh)
    return [stream_T.cpu() for stream_T in streams]


def sample_starts(batch: Batch) -> list[int]:
    """Where each sample begins in the flattened stream."""
    if batch.cu_seqlens is not None:
        return batch.cu_seqlens.tolist()[: len(batch.lengths)]
    return [row * batch.max_seqlen for row in range(len(batch.lengths))]


def write_logprobs(
    output: Path, chunks: Sequence[nn.Module], dataset: EncodedDataset, layout: BatchLayout, source: Source, mesh: Mesh, num_workers: int
) -> None:
    """Write one object a row, in the order of the rows. Called on all ranks."""
    rows = logprob_rows(chunks, dataset, layout, source, mesh, num_workers=num_workers)
    if mesh.rank != 0:
        for _ in rows:
            pass
        return
    aside = output.with_name(output.name + UNFINISHED)
    output.parent.mkdir(parents=True, exist_ok=True)
    with aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    flush(aside)
    aside.replace(output)
    logger.info("wrote log-probabilities of %d rows to %s", len(dataset), output)


def logprob_rows(
    chunks: Sequence[nn.Module], dataset: EncodedDataset, layout: BatchLayout, source: Source, mesh: Mesh, *, num_workers: int = 0
) -> Iterator[dict[str, Any]]:
    """The written object of each row, in the order of the rows, on the first rank; the others go along, and get none."""
    micro_batches = map_in_order(_EveryTokenLabelled(dataset, layout), layout.in_order(dataset.lengths), num_workers=num_workers)
    for group in itertools.batched(micro_batches, mesh.pp_size):  # as many as there are stages to work at the same time
        batches = [batch for batch, _ in group]
        for (batch, records), logprobs_T in zip(group, token_logprobs(chunks, batches, source, mesh), strict=True):
            for record, start, length in zip(records, sample_starts(batch), batch.lengths, strict=True):
                record["logprobs"] = [None, *logprobs_T[start : start + length - 1].tolist()]
            yield from _gathered(records, mesh)


def _gathered(records: list[dict[str, Any]], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """The records of one micro-batch of each data-parallel rank, in order, on the first rank."""
    if mesh.cp_rank == mesh.tp_rank == mesh.pp_rank == 0:
        gathered: list[Any] | None = [None] * mesh.dp_size if mesh.rank == 0 else None
        dist.gather_object(records, gathered, group_dst=0, group=mesh.dp_group)
        for rank_records in gathered or []:
            yield from rank_records
