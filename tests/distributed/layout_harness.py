"""What a layout must give as one rank gives it: loss, gradient norm, every whole gradient, log-probabilities, weights after two steps.

`LAYOUTS` names the layouts; `measure` runs one on the ranks of a pool, on micro-batches with images and a video; `differences` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.model_harness import gradient_excess
from tests.distributed.ranks import RankPool
from tests.distributed.training_harness import Pack, Training, train_config


@dataclass(frozen=True)
class Layout:
    """Keys of the recipe, and how many ranks they take."""

    num_ranks: int
    keys: dict[str, Any] = field(default_factory=dict)


ONE_RANK = Layout(1)
LAYOUTS = {
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "TP2+SP+CP2": Layout(4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}),
    "TP2+SP+CP2, whole": Layout(
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, "cp_partition_mode": "whole"},
    ),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "PP2+CP2, whole": Layout(4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "cp_partition_mode": "whole"}),
    "PP2+CP2": Layout(4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "PP2+DP2": Layout(4, {"pipeline_model_parallel_size": 2}),
    "TP2+SP+PP2": Layout(4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    "DP2": Layout(2),
    "DP2+CP2": Layout(4, {"context_parallel_size": 2}),
    "DP2, distributed optimizer": Layout(2, {"use_distributed_optimizer": True}),
    "TP2+SP+DP2, distributed optimizer": Layout(
        4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True}
    ),
}
CHUNKS = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EIGHT_LAYERS = {
    "PP2 of 2 chunks": Layout(2, CHUNKS),
    "PP2 of 2 chunks+CP2": Layout(4, {**CHUNKS, "context_parallel_size": 2}),
    "PP2 of 2 chunks, 6 and 2 layers": Layout(2, {**CHUNKS, "decoder_first_pipeline_num_layers": 6}),
    "PP2, 3 and 5 layers": Layout(2, {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 5}),
    "PP2+DP2, distributed optimizer": Layout(4, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "PP4": Layout(4, {"pipeline_model_parallel_size": 4}),
}
"""For a model whose first chunk of four has both deepstack levels."""

PACKS = (Pack(("image_and_video", "text", "one_token")), Pack(("three_images", "video", "seven_tokens")))
"""Two micro-batches, or one for each of two data-parallel ranks. Their lengths divide by no layout's sizes."""

OPTIMIZER = {"lr": 1e-2, "adam_eps": 1e-3}
"""With a large epsilon, for Adam turns rounding in entries whose true gradient is zero into whole steps."""


@dataclass(frozen=True)
class Measurement:
    """Of packs, or of padded rows; the same on every rank."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    """Whole, by the checkpoint's names."""
    logprobs: Tensor
    """Of all labelled tokens of all micro-batches, one after the other."""
    router_losses: tuple[float, ...] | None
    """As logged; None where routers are not trained for them."""


@dataclass(frozen=True)
class Result:
    """The same on every rank."""

    packed: Measurement
    padded: Measurement
    weights: dict[str, Tensor]
    """After two optimizer steps on packs, by the checkpoint's names."""


@dataclass(frozen=True)
class Differences:
    """The largest differences of a layout to one rank, relative to the unit that is named."""

    loss: float
    """The loss."""
    grad_norm: float
    """The norm."""
    gradient: float
    """A gradient's largest entry, or 1e-3 of the largest of all gradients where that is larger."""
    logprob: float
    """max(1, the size of the log-probability)."""


BOUNDS = Differences(loss=1e-5, grad_norm=1e-5, gradient=1e-5, logprob=1e-5)
WEIGHT_BOUND = 1e-3
"""Of weights after two steps, relative to the learning rate."""


def of_all_ranks(training: Training, get: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """`get(parameter)` of every trained parameter: whole, of all pipeline stages, by the checkpoint's names."""
    from swiftcp.checkpoint.together import whole_tensors
    from swiftcp.models.mm_gpt_model import named_parameters

    table, mesh = training.source.family.name_table(training.source.hf_config), training.mesh
    own = {name: get(p) for chunk in training.chunks for name, p in named_parameters(chunk) if p.requires_grad}
    of_stages: list[Any] = [None] * mesh.pp_size
    whole = {name: tensor.clone() for name, tensor in whole_tensors(own, table, mesh)}
    dist.all_gather_object(of_stages, whole, group=mesh.pp_group)
    return {name: tensor for stage in of_stages for name, tensor in stage.items()}


def gather_reduced_gradients(wrapped: Sequence[Any], group: dist.ProcessGroup) -> None:
    """With the distributed optimizer a rank holds its share of the reduced gradients alone: bring the others' in."""
    for bucket in (bucket for chunk in wrapped for bucket_group in chunk.bucket_groups for bucket in bucket_group.buckets):
        shares = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(shares, shares[group.rank()].clone(), group=group)


def _gradients(training: Training) -> dict[str, Tensor]:
    return of_all_ranks(training, lambda parameter: parameter.main_grad)


def _measure(training: Training, packs: Sequence[Pack], packing: bool) -> Measurement:
    from swiftcp.trainers.logprobs import token_logprobs
    from swiftcp.trainers.step import run_micro_batches

    batches = training.micro_batches(packs, packing=packing)
    logprobs = token_logprobs([chunk.eval() for chunk in training.chunks], batches, training.source, training.mesh)
    for chunk in training.wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    share = batches[training.mesh.dp_rank :: training.mesh.dp_size]
    totals = run_micro_batches(training.runner, iter(share), len(share))
    if training.config.use_distributed_optimizer:
        gather_reduced_gradients(training.wrapped, training.mesh.dp_cp_group)
    gradients = _gradients(training)
    training.optimizer.prepare_grads()
    labelled = torch.cat([values[values != 0] for values in logprobs])
    return Measurement(totals.loss, float(training.optimizer.get_grad_norm()), gradients, labelled, totals.router_losses)


def measure(folder: Path, keys: dict[str, Any], packs: Sequence[Pack]) -> Result:
    """On each rank of a layout."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **OPTIMIZER, **keys))
        padded, packed = _measure(training, packs, packing=False), _measure(training, packs, packing=True)
        for _ in range(2):
            training.step(packs)
        return Result(packed, padded, of_all_ranks(training, lambda parameter: parameter))


def measure_packed(folder: Path, keys: dict[str, Any], packs: Sequence[Pack]) -> Measurement:
    """On each rank of a layout: of packs alone."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        return _measure(Training(train_config(folder, **OPTIMIZER, **keys)), packs, packing=True)


def gradients_of_modes(folder: Path, keys: dict[str, Any], modes: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """On each rank of a layout: the whole gradients, for each way of recomputation."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        found = []
        for mode in modes:
            training = Training(train_config(folder, **keys), **mode)
            training.gradients(PACKS)
            found.append(_gradients(training))
    return found


def tower_gradients_before_reduction(folder: Path, keys: dict[str, Any]) -> dict[str, Tensor]:
    """On each rank of a layout: its own gradients of the tower, from its own backward passes alone."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **keys))
        training.model.config.finalize_model_grads_func = lambda *arguments, **keywords: None
        gradients = training.gradients(PACKS)
    return {name: gradient for name, gradient in gradients.items() if name.startswith("visual.")}


def differences(got: Measurement, expected: Measurement) -> Differences:
    """The largest of each kind."""
    assert got.logprobs.shape == expected.logprobs.shape
    return Differences(
        loss=abs(got.loss / expected.loss - 1),
        grad_norm=abs(got.grad_norm / expected.grad_norm - 1),
        gradient=max(gradient_excess(got.gradients, expected.gradients, 1.0).values()),
        logprob=((got.logprobs - expected.logprobs).abs() / expected.logprobs.abs().clamp(min=1)).max().item(),
    )


def weight_difference(got: Result, expected: Result) -> float:
    """The largest of any weight after two steps, relative to the learning rate."""
    assert got.weights.keys() == expected.weights.keys()
    return max((got.weights[name] - weight).abs().max().item() for name, weight in expected.weights.items()) / OPTIMIZER["lr"]


def measure_layout(ranks: RankPool, folder: Path, layout: Layout, packs: Sequence[Pack] = PACKS) -> list[Result]:
    """One a rank."""
    return ranks.run(measure, folder, layout.keys, packs, num_ranks=layout.num_ranks)


def over_bounds(found: Differences) -> dict[str, float]:
    """The differences that are too large, NaN included."""
    return {name: value for (name, value), bound in zip(asdict(found).items(), astuple(BOUNDS), strict=True) if not value <= bound}


def table(rows: Mapping[str, Differences]) -> str:
    """Layouts down, kinds of difference across."""
    columns = ("loss", "grad norm", "worst gradient", "log-probability")
    lines = [f"{'largest difference to one rank':<44}" + "".join(f"{column:>22}" for column in columns)]
    lines += [f"{name:<44}" + "".join(f"{value:>22.1e}" for value in astuple(found)) for name, found in rows.items()]
    lines.append(f"{'bound':<44}" + "".join(f"{value:>22.1e}" for value in astuple(BOUNDS)))
    return "\n".join(lines)


def head_of_a_vocabulary_shard(num_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """On each tensor-parallel rank: how far losses, the hidden states' gradient and its own rows' gradient are from those of one rank."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    from swiftcp.models.head import token_losses
    from swiftcp.parallel.mesh import build_mesh

    mesh = build_mesh(torch.device("cpu"), tensor_model_parallel_size=dist.get_world_size())
    generator = torch.Generator().manual_seed(0)
    padded = -(-vocab_size // mesh.tp_size) * mesh.tp_size
    hidden, weight = (torch.randn(size, 16, generator=generator, requires_grad=True) for size in (num_tokens, padded))
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    upstream = torch.rand(num_tokens, generator=generator)
    expected = token_losses(hidden, weight, targets, vocab_size=vocab_size, chunk_tokens=4)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    shard = weight.detach().chunk(mesh.tp_size)[mesh.tp_rank].clone().requires_grad_()
    copied = copy_to_tensor_model_parallel_region(hidden, group=mesh.tp_group)
    losses = token_losses(copied, shard, targets, vocab_size=vocab_size, chunk_tokens=4, group=mesh.tp_group)
    grads = torch.autograd.grad((losses * upstream).sum(), (hidden, shard))
    own = expected_grads[1].chunk(mesh.tp_size)[mesh.tp_rank]
    return (losses - expected).detach(), grads[0] - expected_grads[0], grads[1] - own
