"""Collectives whose backward is the collective that a sum over ranks needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
