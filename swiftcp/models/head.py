"""The output head and the loss of each labelled token.

Only positions that have a label are multiplied with the vocabulary, in chunks whose logits are computed again in the
backward pass: the logits of a long pack (20 GB in float32 at 32k tokens) never exist. On CUDA one kernel reads a chunk's logits
for the losses, and one turns them into their gradient in place.

Legend: N labelled local tokens, H hidden size, U vocabulary rows of the weight (padding included), C tokens of a chunk,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 4096
"""Labelled tokens of one chunk: 1.2 GB of bfloat16 logits at Qwen's vocabulary of 151,936."""


def _row_losses(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of the rows, float32."""
    if logits_CV.is_cuda:
        from swiftcp.models.head_kernels import row_losses

        return row_losses(logits_CV, targets_C)
    logits_CV = logits_CV.float()
    log_sums_C = logits_CV.logsumexp(-1)
    return log_sums_C - logits_CV.gather(-1, targets_C[:, None])[:, 0], log_sums_C


def _logits_to_gradients(logits_CV: Tensor, targets_C: Tensor, log_sums_C: Tensor, grad_C: Tensor) -> Tensor:
    """Gradient of the logits, in their type and, on CUDA, in their place."""
    if logits_CV.is_cuda:
        from swiftcp.models.head_kernels import logits_to_gradients

        return logits_to_gradients(logits_CV, targets_C, log_sums_C, grad_C)
    probabilities_CV = (logits_CV.float() - log_sums_C[:, None]).exp()
    probabilities_CV[torch.arange(targets_C.numel()), targets_C] -= 1.0
    return (probabilities_CV * grad_C[:, None]).to(logits_CV.dtype)


def _add_product(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """total += left^T right, summed in float32 over all chunks."""
    if left_CV.dtype == total_VH.dtype:
        torch.addmm(total_VH, left_CV.t(), right_CH, out=total_VH)
    elif left_CV.is_cuda:
        torch.addmm(total_VH, left_CV.t(), right_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:
        total_VH += left_CV.t().float() @ right_CH.float()


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_UH: Tensor, targets_N: Tensor, vocab_size: int, chunk_tokens: int) -> Tensor:
        losses_N, log_sums_N = (torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_NH.device) for _ in range(2))
        for start in range(0, targets_N.numel(), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = F.linear(hidden_NH[chunk], weight_UH[:vocab_size])
            losses_N[chunk], log_sums_N[chunk] = _row_losses(logits_CV, targets_N[chunk])
        ctx.save_for_backward(hidden_NH, weight_UH, targets_N, log_sums_N)
        ctx.vocab_size, ctx.chunk_tokens = vocab_size, chunk_tokens
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_UH, targets_N, log_sums_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_UH = torch.zeros_like(weight_UH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        weight_VH = weight_UH[: ctx.vocab_size]
        for start in range(0, targets_N.numel(), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits_CV = F.linear(hidden_NH[chunk], weight_VH)
            grad_CV = _logits_to_gradients(logits_CV, targets_N[chunk], log_sums_N[chunk], grads[0][chunk].float())
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[chunk])
            if grad_weight_UH is not None:
                _add_product(grad_weight_UH[: ctx.vocab_size], grad_CV, hidden_NH[chunk])
        return grad_hidden_NH, None if grad_weight_UH is None else grad_weight_UH.to(weight_UH.dtype), None, None, None


def token_losses(hidden_NH: Tensor, weight_UH: Tensor, targets_N: Tensor, *, vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Negative log-probability of each target, natural logarithm.

    Args:
        hidden_NH: final hidden states of the labelled positions; N may be 0, which still leaves a gradient path of zeros.
        weight_UH: the head's weight; rows from `vocab_size` on are padding and take no part.
        targets_N: int64 token ids.

    Returns:
        [N] float32.
    """
    return _TokenLosses.apply(hidden_NH, weight_UH, targets_N, vocab_size, chunk_tokens)
