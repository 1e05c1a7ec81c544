"""The context-parallel partition: which global tokens a rank holds, and how tensors are cut by it.

The index returned by `local_token_index` is the only truth: decoder inputs, labels, positions, deepstack features and the
attention all derive from it. Everything here is pure: sizes and ranks are arguments, and `split_cp_inputs` asks
megatron-core for them only where they are left out.

The layout is the one that Transformer Engine's context-parallel attention expects: each sequence is cut into 2*CP equal
chunks, and rank r holds chunks r and 2*CP-1-r, so that causal attention costs every rank the same. Where a `Partition` says so,
a sequence stays whole on one rank instead: a rank's local stream is its whole sequences, then its chunks of those that are cut.

Legend: T tokens of the full stream, CP ranks of the context-parallel group.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from swiftcp.parallel import mesh
from swiftcp.parallel.partition import CUT, Partition, check_divisible

_index_cache = WeakTensorKeyDictionary()
"""cu_seqlens -> {(num_tokens, cp_size, cp_rank, device): index}: each pack's index is computed once."""


def _compute_index(cu_seqlens: Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Vectorised over the local slots; no loop over sequences and no device-to-host copy."""
    cu = cu_seqlens.to(torch.int64)
    slots = torch.arange(num_tokens // cp_size, device=cu.device)
    sequence = torch.searchsorted(cu[1:] // cp_size, slots, right=True)
    start = cu[sequence]
    chunk = (cu[sequence + 1] - start) // (2 * cp_size)
    offset = slots - start // cp_size
    in_second = offset >= chunk
    first = start + cp_rank * chunk + offset
    second = start + (2 * cp_size - 1 - cp_rank) * chunk + offset - chunk
    return torch.where(in_second, second, first)


def _partition_index(partition: Partition, cp_rank: int, device: torch.device) -> Tensor:
    """Computed once, on the host."""
    if (cp_rank, device) not in partition.indices:
        whole, cut = ([torch.arange(*span) for span in partition.spans(owner)] for owner in (cp_rank, CUT))
        if cut:
            lengths = partition.lengths(CUT)
            check_divisible(lengths, partition.cp_size)
            of_cut = _compute_index(torch.tensor([0, *itertools.accumulate(lengths)]), sum(lengths), partition.cp_size, cp_rank)
            whole.append(torch.cat(cut)[of_cut])
        partition.indices[cp_rank, device] = torch.cat(whole).to(device)
    return partition.indices[cp_rank, device]


def local_token_index(
    cu_seqlens: Tensor | Partition | None, num_tokens: int, *, cp_size: int, cp_rank: int, device: torch.device | None = None
) -> Tensor:
    """Which global token sits in each local slot.

    Args:
        cu_seqlens: [n + 1] cumulative padded lengths from 0 to `num_tokens`, of sequences that are all cut; or the partition of a
            pack; or None for one sequence of `num_tokens`.
        num_tokens: T, tokens of the full stream.
        device: where the index is wanted; that of `cu_seqlens` (or the CPU) if left out.

    Returns:
        [T / CP] int64.

    Raises:
        ValueError: a sequence length is no multiple of 2*CP (checked where `cu_seqlens` is on the host; on a device the
            host copy was checked before it was sent, and a check here would stall the device), or the lengths do not
            add up to `num_tokens`.
    """
    if isinstance(cu_seqlens, Partition):
        assert (cu_seqlens.cp_size, cu_seqlens.ends[-1]) == (cp_size, num_tokens)
        return _partition_index(cu_seqlens, cp_rank, device or torch.device("cpu"))
    if cu_seqlens is None:
        check_divisible([num_tokens], cp_size)
        # [0, num_tokens], made on the device, for a copy from the host would wait for it.
        return _compute_index(torch.arange(2, device=device) * num_tokens, num_tokens, cp_size, cp_rank)
    key = (num_tokens, cp_size, cp_rank, device or cu_seqlens.device, cu_seqlens._version)
    cached = _index_cache.setdefault(cu_seqlens, {})
    if key not in cached:
        if cu_seqlens.device.type == "cpu":
            ends = cu_seqlens.tolist()
            check_divisible([end - start for start, end in itertools.pairwise(ends)], cp_size)
            if ends[0] != 0 or ends[-1] != num_tokens:
                raise ValueError(f"cu_seqlens runs from {ends[0]} to {ends[-1]}, but the stream has {num_tokens} tokens")
        index = _compute_index(cu_seqlens, num_tokens, cp_size, cp_rank)
        cached[key] = index if device is None else index.to(device)
    return cached[key]


def split_cp_inputs(
    inputs: Tensor | None,
    cu_seqlens: Tensor | Partition | None,
    dim: int,
    *,
    cp_size: int | None = None,
    cp_rank: int | None = None,
) -> Tensor | None:
    """This rank's part of a tensor of the full stream.

    Args:
        inputs: the full tensor; decoder inputs [T, B, H] are cut on dim 0, token tensors ([B, T], [3, B, T]) on dim -1.
            None gives None.
        cu_seqlens: cumulative padded lengths of the packed sequences, or the partition that keeps some of them whole, or None to
            cut the whole dim as one sequence.
        dim: the dim that holds the tokens.
        cp_size, cp_rank: this process's place in the context-parallel group where left out.

    Returns:
        A tensor with `dim` CP times shorter; the same object where CP is 1.

    Raises:
        ValueError: a length is no multiple of 2*CP.
    """
    cp_size = mesh.context_parallel_size() if cp_size is None else cp_size
    if inputs is None or cp_size == 1:
        return inputs
    cp_rank = mesh.context_parallel_rank() if cp_rank is None else cp_rank
    index = local_token_index(cu_seqlens, inputs.size(dim), cp_size=cp_size, cp_rank=cp_rank, device=inputs.device)
    return inputs.index_select(dim, index)


def stream_order(cu_seqlens: Tensor | Partition | None, num_tokens: int, *, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Where each global token lies in the concatenation of all ranks' local streams: the inverse of the partition.

    Returns:
        [T] int64: `torch.cat(local_streams)[stream_order(...)]` is the full stream.
    """
    parts = [local_token_index(cu_seqlens, num_tokens, cp_size=cp_size, cp_rank=rank, device=device) for rank in range(cp_size)]
    order = torch.cat(parts)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(num_tokens, device=order.device)
    return inverse
