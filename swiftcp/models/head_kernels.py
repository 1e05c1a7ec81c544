"""Triton kernels of the loss: one program a row of logits, float32 inside whatever the logits are. CUDA only.

The log-sum-exp is taken in one pass, with a running maximum (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).

Legend: C tokens of a chunk, V rows of the vocabulary on this rank. A target outside of them is not found by either kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 16


@triton.jit
def _row_statistics(logits, targets, log_sums, of_targets, row_stride, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    largest = -float("inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(values - new_largest), 0)
        largest = new_largest
    target = tl.load(targets + row)
    of_target = tl.load(logits + target, mask=(target >= 0) & (target < num_columns), other=0.0).to(tl.float32)
    tl.store(log_sums + row, largest + tl.log(total))
    tl.store(of_targets + row, of_target)


@triton.jit
def _gradients(logits, targets, log_sums, grads, row_stride, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    log_sum = tl.load(log_sums + row)
    grad = tl.load(grads + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        values = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
        gradients = (tl.exp(values - log_sum) - tl.where(columns == target, 1.0, 0.0)) * grad
        tl.store(logits + columns, gradients.to(logits.dtype.element_ty), mask=inside)


def row_statistics(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of the rows, and their targets' logits, 0 where the target is outside; float32."""
    num_rows, num_columns = logits_CV.shape
    log_sums_C, of_targets_C = (torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device) for _ in range(2))
    _row_statistics[(num_rows,)](
        logits_CV, targets_C, log_sums_C, of_targets_C, logits_CV.stride(0), num_columns, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return log_sums_C, of_targets_C


def logits_to_gradients(logits_CV: Tensor, targets_C: Tensor, log_sums_C: Tensor, grad_C: Tensor) -> Tensor:
    """Overwrites the logits by their gradient, and returns them.

    Args:
        grad_C: float32 gradients of the losses, contiguous.
    """
    num_rows, num_columns = logits_CV.shape
    _gradients[(num_rows,)](
        logits_CV, targets_C, log_sums_C, grad_C.contiguous(), logits_CV.stride(0), num_columns, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return logits_CV
