"""Stages of `swiftcp parity` with one fault put in: the command must find each of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def contiguous_partition() -> Any:
    """Each rank holds one run of tokens of each sequence, where the attention expects two chunks."""
    from swiftcp.parallel import context

    def index(cu_seqlens: Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
        runs = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            length = (end - start) // cp_size
            runs.append(torch.arange(start + cp_rank * length, start + (cp_rank + 1) * length))
        return torch.cat(runs)

    return mock.patch.object(context, "_compute_index", index)


def wrong_half_of_the_partition() -> Any:
    """Each rank's second chunk of a sequence is the one that follows in order, where the attention expects them from the end."""
    from swiftcp.parallel import context

    def index(cu_seqlens: Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
        parts = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            length = (end - start) // (2 * cp_size)
            parts += [torch.arange(start + chunk * length, start + (chunk + 1) * length) for chunk in (cp_rank, cp_size + cp_rank)]
        return torch.cat(parts)

    return mock.patch.object(context, "_compute_index", index)


def tower_gradients_not_summed() -> Any:
    """Each rank's features get the gradient of their use on this rank alone."""
    from swiftcp.parallel import collectives

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None

    return mock.patch.object(collectives._GatherFirstDim, "backward", staticmethod(backward))


def labels_shifted_after_the_cut() -> Any:
    """Each rank shifts its local labels, so that tokens at the borders of chunks predict the wrong token."""
    from swiftcp.data.batch import IGNORED_LABEL
    from swiftcp.models import inputs

    correct = inputs.local_labels

    def local_labels(batch: Any, cu_seqlens: Any, *, cp_size: int, cp_rank: int) -> tuple[Tensor, Tensor]:
        aligned = dataclasses.replace(batch, labels_BS=batch.labels_BS.roll(1, -1), weights_BS=batch.weights_BS.roll(1, -1))
        labels, weights = (values.roll(-1, -1) for values in correct(aligned, cu_seqlens, cp_size=cp_size, cp_rank=cp_rank))
        labels[:, -1], weights[:, -1] = IGNORED_LABEL, 0.0
        return labels, weights

    return mock.patch.object(inputs, "local_labels", local_labels)


def sectioned_mrope() -> Any:
    """Frequencies in three blocks, as in Qwen2-VL, where Qwen3-VL interleaves them."""
    from swiftcp.models.rotary import MultimodalRotary

    def axes(sections: Sequence[int]) -> Tensor:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))

    return mock.patch.object(MultimodalRotary, "_axes", staticmethod(axes))


def deepstack_off() -> Any:
    """Decoder layers add no visual features."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from swiftcp.parallel.layer_specs import DeepstackLayer

    def forward(self: Any, hidden_states: Tensor, *, context: Any = None, context_mask: Any = None, **kwargs: Any) -> Any:
        hidden_states, _ = TransformerLayer.forward(self, hidden_states, **kwargs)
        return hidden_states, context

    return mock.patch.object(DeepstackLayer, "forward", forward)


def deepstack_sliced() -> Any:
    """Under sequence parallelism each rank slices the deepstack features, so that their gradient stays with the owner of the token."""
    from swiftcp.models import mm_gpt_model

    return mock.patch.object(mm_gpt_model, "scatter_shares", lambda whole, shares, group: whole.split(shares)[group.rank()])


def head_gradient_not_summed() -> Any:
    """The hidden states keep the part of their gradient that comes from the rank's own rows of the vocabulary."""
    from swiftcp.models import mm_gpt_model

    return mock.patch.object(mm_gpt_model, "copy_to_tensor_model_parallel_region", lambda hidden, group: hidden)


FAULTS = {
    function.__name__: function
    for function in (
        contiguous_partition,
        wrong_half_of_the_partition,
        labels_shifted_after_the_cut,
        sectioned_mrope,
        deepstack_off,
        tower_gradients_not_summed,
    )
}
TENSOR_PARALLEL_FAULTS = {function.__name__: function for function in (deepstack_sliced, head_gradient_not_summed)}


def run_stage(task: dict[str, Any], fault: str | None) -> None:
    """On each rank of a pool: one stage, with a fault or without."""
    from swiftcp.parallel import mesh
    from swiftcp.trainers import parity_stages

    with (FAULTS | TENSOR_PARALLEL_FAULTS)[fault]() if fault else mock.MagicMock(), mock.patch.object(mesh, "stop"):
        parity_stages.run_stage(task)
