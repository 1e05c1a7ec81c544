"""Loss, log-probabilities and every gradient of the tiny model: ours under a layout, and those of `transformers`.

The functions run on the ranks of a pool. Gradients come back under the checkpoint's names, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftcp.data.batch import Batch, Sample, collate_pack, collate_rows
from tests.samples import make_sample

PACK_ALIGN = 8
"""A multiple of 2*CP for each CP that the tests use."""


@dataclass(frozen=True)
class Row:
    """One row of a test's data: a mix of `samples.MIXES`, the share of its text that has labels, and between which positions."""

    mix: str
    labelled: float = 0.7
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Result:
    loss_sum: float
    num_labels: int
    labels_of_ranks: list[int]
    """Labelled tokens that each rank of the context-parallel group held."""
    logprobs: list[Tensor]
    """[L - 1] of each row: of every next token, labelled or not."""
    gradients: dict[str, Tensor]
    """Of the weighted loss sum, by the checkpoint's tensor names."""


@cache
def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def samples_of(folder: Path, rows: Sequence[Row]) -> list[Sample]:
    return [make_sample(row.mix, _config(folder), row=index, labelled=row.labelled, span=row.span) for index, row in enumerate(rows)]


def _with_every_label(sample: Sample) -> Sample:
    return replace(sample, labels_L=sample.input_ids_L, weights_L=torch.ones(len(sample)))


def collate(samples: Sequence[Sample], packing: bool, microbatches: int, total_length: int | None = None) -> list[Batch]:
    """The rows in order, in `microbatches` packs (of `total_length` tokens), or in as many padded micro-batches."""
    per_batch = -(-len(samples) // microbatches)
    parts = [samples[start : start + per_batch] for start in range(0, len(samples), per_batch)]
    if packing:
        return [collate_pack(part, pack_align=PACK_ALIGN, pad_token_id=0, total_length=total_length) for part in parts]
    return [collate_rows(part, pack_align=PACK_ALIGN, pad_token_id=0) for part in parts]


def build(folder: Path, cp_size: int, partition: Any = "zigzag", **recompute: Any) -> tuple[Any, Any, Any]:
    """(model with the folder's weights, mesh, family); call inside `cpu_mode()`."""
    from megatron.core import tensor_parallel

    from swiftcp.checkpoint.hf_reader import load_hf_folder
    from swiftcp.models.build import build_model, transformer_config
    from swiftcp.models.registry import family_of
    from swiftcp.parallel.mesh import build_mesh

    hf_config = _config(folder)
    family = family_of(hf_config.model_type)
    mesh = build_mesh(torch.device("cpu"), context_parallel_size=cp_size, cp_partition_mode=partition)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(family, hf_config, mesh, dtype=torch.float32, backend="torch", **recompute)
    model = build_model(family, hf_config, config, mesh, backend="torch")
    load_hf_folder(model, folder, family.name_table(hf_config))
    return model, mesh, family


def _all_logprobs(model: Any, mesh: Any, geometry: Any, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Tensor]:
    from swiftcp.models.inputs import make_inputs

    rows = []
    with torch.no_grad():
        for batch in batches:
            inputs = make_inputs(batch, mesh, geometry)
            stream = torch.zeros(batch.input_ids_BS.numel())
            stream[inputs.label_positions_N] = -model(inputs)
            dist.all_reduce(stream, group=mesh.cp_group)
            ends = batch.cu_seqlens.tolist() if batch.packed else [i * batch.max_seqlen for i in range(len(batch.lengths))]
            rows += [stream[start : start + length - 1] for start, length in zip(ends, batch.lengths, strict=False)]
    return rows


def run_ours(
    folder: Path,
    rows: Sequence[Row],
    cp_size: int,
    packing: bool = True,
    microbatches: int = 1,
    recompute: dict[str, Any] | None = None,
    partition: str = "zigzag",
    total_length: int | None = None,
) -> Result:
    """On each of `cp_size` ranks: all rows in `microbatches` micro-batches; gradients summed over the group."""
    from swiftcp.models.inputs import make_inputs
    from swiftcp.parallel.cpu_shim import cpu_mode

    samples = samples_of(folder, rows)
    with cpu_mode():
        model, mesh, family = build(folder, cp_size, partition, **(recompute or {}))
        geometry = family.tower_geometry(_config(folder))
        every_label = collate([_with_every_label(sample) for sample in samples], packing, microbatches, total_length)
        logprobs = _all_logprobs(model.eval(), mesh, geometry, every_label, samples)
        model.train()
        totals = torch.zeros(1)
        num_labels = torch.zeros(cp_size, dtype=torch.int64)
        for batch in collate(samples, packing, microbatches, total_length):
            inputs = make_inputs(batch, mesh, geometry)
            loss = (model(inputs) * inputs.weights_N).sum()
            loss.backward()
            totals += loss.detach()
            num_labels[mesh.cp_rank] += inputs.num_labels
        for total in (totals, num_labels):
            dist.all_reduce(total, group=mesh.cp_group)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        assert not missing, f"no gradient on rank {mesh.cp_rank} for {missing}"
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=mesh.cp_group)
        named = family.name_table(_config(folder)).to_sources(gradients)
    return Result(totals.item(), int(num_labels.sum()), num_labels.tolist(), logprobs, named)


def run_transformers(folder: Path, rows: Sequence[Row]) -> Result:
    """One row at a time through `transformers`."""
    from swiftcp.models.registry import family_of
    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs

    model = load_oracle(folder, family_of(_config(folder).model_type), dtype=torch.float32, device=torch.device("cpu"))
    loss_sum, num_labels, logprobs = 0.0, 0, []
    for sample in samples_of(folder, rows):
        row_logprobs = oracle_logprobs(model, sample)
        logprobs.append(row_logprobs.detach())
        loss = -(row_logprobs * sample.weights_L[1:]).sum()
        if loss.requires_grad:
            loss.backward()
        loss_sum += loss.item()
        num_labels += int((sample.weights_L[1:] > 0).sum())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    named = {name: torch.zeros(shapes[name]) if gradient is None else gradient for name, gradient in gradients.items()}
    return Result(loss_sum, num_labels, [num_labels], logprobs, as_stored(named, _config(folder)))


def as_stored(named: dict[str, Tensor], hf_config: Any) -> dict[str, Tensor]:
    """Names and tensors of a model of `transformers` as its checkpoint has them: experts of some families are stored one by one."""
    if not hf_config.model_type.startswith(("qwen3_omni_moe", "qwen3_5_moe")):
        return named
    root = "thinker." if hasattr(hf_config, "thinker_config") else ""
    stored: dict[str, Tensor] = {}
    for name, tensor in named.items():
        base, _, fused = f"{root}{name}".partition(".experts.")
        if not fused:
            stored[base] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
        for part, of_experts in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            stored |= {f"{base}.experts.{expert}.{part}.weight": matrix for expert, matrix in enumerate(of_experts)}
    return stored


def gradient_excess(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> dict[str, float]:
    """|difference| of each gradient over relative * max(its largest entry, 1e-3 * the largest of all); above 1 is broken."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    largest = {name: tensor.abs().max().item() for name, tensor in expected.items()}
    floor = 1e-3 * max(largest.values())
    units = {name: relative * max(largest[name], floor) for name in expected}
    for name in expected:
        if name.endswith("k_proj.bias"):  # softmax does not see it: its gradient is zero, and what is there is rounding on either side
            units[name] *= 10
    return {name: (got[name] - expected[name]).abs().max().item() / units[name] for name in expected}
