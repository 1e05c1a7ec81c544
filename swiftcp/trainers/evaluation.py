"""The loss over a validation data set: the mean over all its labelled tokens, the same number for any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from swiftcp.data.batch import Batch
from swiftcp.trainers.step import Runner, Totals, run_micro_batches


@torch.no_grad()
def evaluate(runner: Runner, batches: Iterator[Batch], num_micro_batches: int, *, num_steps: int | None = None) -> Totals:
    """Forward passes alone, in global batches of `num_micro_batches` a rank; every rank must have equally many batches.

    Args:
        num_steps: global batches at most; None: all.
    """
    steps = itertools.islice(itertools.batched(batches, num_micro_batches), num_steps)
    for chunk in runner.chunks:
        chunk.eval()
    found = [run_micro_batches(runner, iter(step), len(step), forward_only=True) for step in steps]
    for chunk in runner.chunks:
        chunk.train()
    return Totals(
        loss_sum=sum(totals.loss_sum for totals in found),
        labelled_tokens=sum(totals.labelled_tokens for totals in found),
        tokens=sum(totals.tokens for totals in found),
        padded_tokens=sum(totals.padded_tokens for totals in found),
        flops=sum(totals.flops for totals in found),
    )
