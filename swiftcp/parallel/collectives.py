"""Collectives whose backward is the collective that a sum over ranks needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _GatherFirstDim(torch.autograd.Function):
    """All-gather forward, reduce-scatter (sum) backward: each rank's part gets the gradients of all its consumers."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((local.size(0) * group.size(), *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        local = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(local, grad.contiguous(), group=ctx.group)
        return local, None


def gather_first_dim(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [n * ranks, ...], rank after rank; n must be the same on all. The gradient is summed over the ranks."""
    return _GatherFirstDim.apply(local, group)


class _ScatterShares(torch.autograd.Function):
    """This rank's share forward, all-gather backward: every rank gets the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shares: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.shares, ctx.group = shares, group
        return whole.split(shares)[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, largest = grads[0], max(ctx.shares)
        padding = largest - grad.size(0)
        padded = F.pad(grad, (*[0, 0] * (grad.dim() - 1), 0, padding)).contiguous()
        gathered = grad.new_empty((len(ctx.shares), largest, *grad.shape[1:]))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), padded, group=ctx.group)
        return torch.cat([part[:size] for part, size in zip(gathered, ctx.shares, strict=True)]), None, None


def scatter_shares(whole: Tensor, shares: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Of a tensor that all ranks of the group have, this rank's entries of the first dim; the gradient of the whole is gathered.

    Args:
        shares: how many entries each rank gets, one rank after the other; the same on all ranks.
    """
    return _ScatterShares.apply(whole, tuple(shares), group)


class _Exchange(torch.autograd.Function):
    """All-to-all, which is its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...], a part for each rank -> [ranks, ...], a part from each rank."""
    return _Exchange.apply(parts, group)
