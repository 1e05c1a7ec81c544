"""The output head and the loss of each labelled token.

Only positions that have a label are multiplied with the vocabulary, in chunks whose logits are computed again in the
backward pass: full float32 logits of a long pack (20 GB at 32k tokens) never exist.

Legend: N labelled local tokens, H hidden size, U vocabulary rows of the weight (padding included).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 2048
"""Labelled tokens of one chunk: 1.2 GB of float32 logits at Qwen's vocabulary of 151,936."""


def _chunk_losses(hidden_NH: Tensor, weight_UH: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    logits = F.linear(hidden_NH, weight_UH[:vocab_size]).float()
    return F.cross_entropy(logits, targets_N, reduction="none")


def token_losses(hidden_NH: Tensor, weight_UH: Tensor, targets_N: Tensor, *, vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Negative log-probability of each target, natural logarithm.

    Args:
        hidden_NH: final hidden states of the labelled positions; N may be 0, which still leaves a gradient path of zeros.
        weight_UH: the head's weight; rows from `vocab_size` on are padding and take no part.
        targets_N: int64 token ids.

    Returns:
        [N] float32.
    """
    if hidden_NH.size(0) <= chunk_tokens:
        return _chunk_losses(hidden_NH, weight_UH, targets_N, vocab_size)
    losses = [
        checkpoint(_chunk_losses, hidden, weight_UH, targets, vocab_size, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True)
    ]
    return torch.cat(losses)
