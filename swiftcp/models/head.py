"""The output head and the loss of each labelled token.

Only positions that have a label are multiplied with the vocabulary, in chunks whose logits are computed again in the
backward pass: the logits of a long pack (20 GB in float32 at 32k tokens) never exist. On CUDA one kernel reads a chunk's logits
for the losses, and one turns them into their gradient in place.

Under tensor parallelism each rank has the rows of a part of the vocabulary. What a position's loss needs of the others is two numbers,
the log-sum-exp over their rows and the target's logit, which come in one all-gather for all positions.

Legend: N labelled local tokens, H hidden size, U vocabulary rows of this rank's weight (padding included), C tokens of a chunk,
V those of them that are no padding. Targets count from this rank's first row, and may lie outside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 4096
"""Labelled tokens of one chunk: 1.2 GB of bfloat16 logits at Qwen's vocabulary of 151,936."""


def _inside(targets_C: Tensor, num_rows: int) -> Tensor:
    return (targets_C >= 0) & (targets_C < num_rows)


def _row_statistics(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of the rows, and their targets' logits, 0 where the target is outside; float32."""
    if logits_CV.is_cuda:
        from swiftcp.models.head_kernels import row_statistics

        return row_statistics(logits_CV, targets_C)
    logits_CV = logits_CV.float()
    of_targets_C = logits_CV.gather(-1, targets_C.clamp(0, logits_CV.size(-1) - 1)[:, None])[:, 0]
    return logits_CV.logsumexp(-1), of_targets_C * _inside(targets_C, logits_CV.size(-1))


def _logits_to_gradients(logits_CV: Tensor, targets_C: Tensor, log_sums_C: Tensor, grad_C: Tensor) -> Tensor:
    """Gradient of the logits, in their type and, on CUDA, in their place."""
    if logits_CV.is_cuda:
        from swiftcp.models.head_kernels import logits_to_gradients

        return logits_to_gradients(logits_CV, targets_C, log_sums_C, grad_C)
    probabilities_CV = (logits_CV.float() - log_sums_C[:, None]).exp()
    num_rows = logits_CV.size(-1)
    probabilities_CV[torch.arange(targets_C.numel()), targets_C.clamp(0, num_rows - 1)] -= _inside(targets_C, num_rows).float()
    return (probabilities_CV * grad_C[:, None]).to(logits_CV.dtype)


def _add_product(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """total += left^T right, summed in float32 over all chunks."""
    if left_CV.dtype == total_VH.dtype:
        torch.addmm(total_VH, left_CV.t(), right_CH, out=total_VH)
    elif left_CV.is_cuda:
        torch.addmm(total_VH, left_CV.t(), right_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:
        total_VH += left_CV.t().float() @ right_CH.float()


def _over_vocabulary(statistics_2N: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exps over the whole vocabulary and the targets' logits, [N] each, out of each rank's part."""
    if group is None or group.size() == 1:
        return statistics_2N[0], statistics_2N[1]
    gathered = statistics_2N.new_empty((group.size(), *statistics_2N.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), statistics_2N, group=group)
    return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_UH: Tensor, targets_N: Tensor, num_rows: int, chunk_tokens: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        statistics_2N = torch.empty((2, *targets_N.shape), dtype=torch.float32, device=hidden_NH.device)
        for start in range(0, targets_N.numel(), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = F.linear(hidden_NH[chunk], weight_UH[:num_rows])
            statistics_2N[0, chunk], statistics_2N[1, chunk] = _row_statistics(logits_CV, targets_N[chunk])
        log_sums_N, of_targets_N = _over_vocabulary(statistics_2N, group)
        ctx.save_for_backward(hidden_NH, weight_UH, targets_N, log_sums_N)
        ctx.num_rows, ctx.chunk_tokens = num_rows, chunk_tokens
        return log_sums_N - of_targets_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_UH, targets_N, log_sums_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_UH = torch.zeros_like(weight_UH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_VH = weight_UH[: ctx.num_rows]
        for start in range(0, targets_N.numel(), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits_CV = F.linear(hidden_NH[chunk], weight_VH)
            grad_CV = _logits_to_gradients(logits_CV, targets_N[chunk], log_sums_N[chunk], grads[0][chunk].float())
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[chunk])
            if grad_weight_UH is not None:
                _add_product(grad_weight_UH[: ctx.num_rows], grad_CV, hidden_NH[chunk])
        return grad_hidden_NH, None if grad_weight_UH is None else grad_weight_UH.to(weight_UH.dtype), None, None, None, None


def token_losses(
    hidden_NH: Tensor,
    weight_UH: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int = CHUNK_TOKENS,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Negative log-probability of each target, natural logarithm.

    Args:
        hidden_NH: final hidden states of the labelled positions; N may be 0, which still leaves a gradient path of zeros.
        weight_UH: this rank's rows of the head's weight; those of tokens from `vocab_size` on are padding and take no part.
        targets_N: int64 token ids, the same on all ranks of the group.
        group: the tensor-parallel ranks, which hold the rows one after the other; None: all rows are here.

    Returns:
        [N] float32, the same on all ranks of the group. In the backward pass `hidden_NH` gets the part of its gradient that comes from
        this rank's rows: the caller sums the parts over the group.
    """
    first_row = 0 if group is None else group.rank() * weight_UH.size(0)
    num_rows = min(weight_UH.size(0), vocab_size - first_row)
    assert num_rows > 0, "a rank without any row of the vocabulary"
    return _TokenLosses.apply(hidden_NH, weight_UH, targets_N - first_row, num_rows, chunk_tokens, group)
