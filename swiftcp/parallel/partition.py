"""Which sequences of a pack stay whole on one rank of a context-parallel group, and which are cut among all of them.

A short sequence that is cut costs an exchange of keys and values and many small kernels, and gains nothing: it would fit one rank. So
short ones are dealt out whole, and only what cannot be dealt out evenly is cut as `swiftcp.parallel.context` says. What a pack needs:

* every rank gets the same number of tokens, hence the same number of tokens of whole sequences;
* a part of the local stream, whole or cut, is empty on all ranks or on none, for the cut part takes a collective;
* all ranks, of all pipeline stages, come to the same partition: it is a pure function of lengths and constants.

Everything here is on the host and takes Python integers. Legend: a *unit* is the largest length that divides all of a pack's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PartitionMode = Literal["auto", "zigzag", "whole"]

CUT = -1
"""In place of an owner: the sequence is cut among all ranks."""
LONGEST_TO_CUT = 16
"""Partitions that are looked at cut none, the longest one, the two longest, ... of a pack's sequences; more than so many gain nothing."""
LEAST_SAVING = 0.02
"""Share of the zigzag partition's expected time that another must save for `auto` to take it: what lies below is within the error."""


def check_divisible(lengths: Sequence[int], cp_size: int) -> None:
    """Raise unless every sequence length can be cut into 2*CP equal chunks.

    Raises:
        ValueError: names the first length that does not divide, and the multiple.
    """
    multiple = 2 * cp_size
    for index, length in enumerate(lengths):
        if length % multiple:
            padded = -(-length // multiple) * multiple
            raise ValueError(f"sequence {index} has {length} tokens, which is no multiple of 2*CP = {multiple}: pad it to {padded}")


@dataclass(frozen=True)
class Partition:
    """Which rank holds each sequence of a pack."""

    ends: tuple[int, ...]
    """[n + 1] cumulative lengths from 0. The padding at a pack's end may count as several sequences here."""
    owners: tuple[int, ...]
    """[n] the rank that holds a sequence whole, or `CUT`."""
    cp_size: int
    indices: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What `swiftcp.parallel.context` has computed of it: tensors by rank and device."""

    def spans(self, owner: int) -> list[tuple[int, int]]:
        """(start, end) of the sequences that a rank holds whole, or of those that are cut, in stream order; empty ones are left out."""
        pairs = zip(itertools.pairwise(self.ends), self.owners, strict=True)
        return [span for span, of_span in pairs if of_span == owner and span[1] > span[0]]

    def map(self, send: Callable[[Any], Any]) -> Partition:
        """The same with `send` applied to each tensor that was computed of it."""
        sent = {rank: send(index) for (rank, _), index in self.indices.items()}
        return replace(self, indices={(rank, index.device): index for rank, index in sent.items()})

    def lengths(self, owner: int) -> list[int]:
        return [end - start for start, end in self.spans(owner)]


@dataclass(frozen=True)
class CostModel:
    """What core attention costs a rank, forward and backward, in one layer: an estimate to choose by.

    The defaults were fitted to two H200s that are linked by NVLink, with 32 query heads and 8 key/value heads of 128 (the 8B shape): one
    document of 32,768 tokens took 59.6 ms on one rank and 31.7 ms on two, eight of 4,096 took 9.2 and 6.2 ms. Over slower links
    sequences gain more by staying whole, so these constants err on the side of zigzag.
    """

    query_width: int = 32 * 128
    """Query heads x head size."""
    key_width: int = 8 * 128
    """Key/value heads x head size."""
    flops_per_second: float = 450e12
    bytes_per_second: float = 120e9
    """Received by a rank, not hidden behind kernels."""
    seconds_a_call: float = 100e-6
    """To launch the kernels of one attention; the ring over a group makes one for each rank."""

    def seconds(self, partition: Partition) -> float:
        """Until the slowest rank is done."""
        cp_size, cut = partition.cp_size, partition.lengths(CUT)
        whole = [partition.lengths(rank) for rank in range(cp_size)]
        pairs = max(sum(map(_pairs, lengths)) for lengths in whole) + sum(map(_pairs, cut)) / cp_size
        calls = bool(whole[0]) + cp_size * bool(cut)
        # Two products forward and five backward. Keys and values come in twice, their gradients once, each of two bytes.
        flops = 7 * 2 * pairs * self.query_width
        received = 3 * 2 * 2 * self.key_width * sum(cut) * (cp_size - 1) / cp_size
        return flops / self.flops_per_second + received / self.bytes_per_second + calls * self.seconds_a_call


COSTS = CostModel()


def _pairs(length: int) -> float:
    """Of a query and a key that it sees."""
    return length * (length + 1) / 2


def zigzag_partition(ends: Sequence[int], cp_size: int) -> Partition:
    """Every sequence cut."""
    return Partition(tuple(ends), (CUT,) * (len(ends) - 1), cp_size)


def plan_partition(
    ends: Sequence[int], *, num_samples: int, cp_size: int, mode: PartitionMode, costs: CostModel = COSTS
) -> Partition | None:
    """The partition of a pack, or None for the zigzag partition of every sequence.

    Args:
        ends: [n + 1] cumulative padded lengths, from 0.
        num_samples: how many of the n sequences hold samples; what stands behind them is padding, which may lie anywhere in pieces.
        mode: `whole` gives the partition of least cost that keeps at least one sample whole, if there is any; `auto` gives it where
            it is expected to save time; `zigzag` never does.

    Raises:
        ValueError: a length is no multiple of 2*CP.
    """
    if mode == "zigzag" or cp_size == 1:
        return None
    check_divisible([end - start for start, end in itertools.pairwise(ends)], cp_size)
    best = min(_partitions(ends, num_samples, cp_size), key=costs.seconds, default=None)
    if best is not None and mode == "auto":
        most = (1 - LEAST_SAVING) * costs.seconds(zigzag_partition(ends, cp_size))
        return best if costs.seconds(best) <= most else None
    return best


def _partitions(ends: Sequence[int], num_samples: int, cp_size: int) -> Iterator[Partition]:
    """Those that keep a sample whole (or, where there is none, the padding): with ever more of the longest sequences cut."""
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    unit = math.gcd(*lengths) or 1
    units = [length // unit for length in lengths]
    padding = sum(units[num_samples:])
    order = sorted(range(num_samples), key=lambda sequence: -units[sequence])
    for num_cut in range(min(num_samples, LONGEST_TO_CUT) + 1):
        bins = _deal(order[num_cut:], units, cp_size)
        whole, kept = _level(bins, units, padding)
        owners = [CUT] * num_samples
        for rank, sequences in enumerate(kept):
            for sequence in sequences:
                owners[sequence] = rank
        if num_samples and set(owners) == {CUT}:
            continue
        # What each rank lacks is padding, and the rest of the padding goes to all of them alike.
        lacking = [whole - sum(units[sequence] for sequence in sequences) for sequences in kept]
        rest = (padding - sum(lacking)) * unit // cp_size
        pieces = [unit * of_rank + rest for of_rank in lacking]
        piece_ends = list(itertools.accumulate(pieces, initial=ends[num_samples]))
        yield Partition((*ends[:num_samples], *piece_ends), (*owners, *range(cp_size)), cp_size)


def _deal(order: Sequence[int], units: Sequence[int], cp_size: int) -> list[list[int]]:
    """The sequences, longest first, each to the rank with the fewest tokens, and of these to the one with the least attention."""
    bins: list[list[int]] = [[] for _ in range(cp_size)]
    loads = [(0, 0)] * cp_size
    for sequence in order:
        rank = loads.index(min(loads))
        bins[rank].append(sequence)
        tokens, squares = loads[rank]
        loads[rank] = (tokens + units[sequence], squares + units[sequence] ** 2)
    return bins


def _level(bins: Sequence[Sequence[int]], units: Sequence[int], padding: int) -> tuple[int, list[list[int]]]:
    """The most units that every rank can hold in whole sequences, with padding where they lack, and the sequences each of them keeps.

    Which sums a rank's sequences can make is a set of bits (bit s: some of them make s), so that n sequences of u units in all take
    n shifts of u bits.
    """
    sums = []
    for sequences in bins:
        of_prefixes = [1]
        for sequence in reversed(sequences):  # shortest first
            of_prefixes.append(of_prefixes[-1] | of_prefixes[-1] << units[sequence])
        sums.append(of_prefixes)
    total = sum(units[sequence] for sequences in bins for sequence in sequences) + padding
    for whole in range(total // len(bins), -1, -1):
        nearest = [(of_prefixes[-1] & (2 << whole) - 1).bit_length() - 1 for of_prefixes in sums]
        if sum(whole - of_rank for of_rank in nearest) <= padding:
            kept = [_subset(*of_rank, units) for of_rank in zip(bins, sums, nearest, strict=True)]
            return whole, kept
    raise AssertionError("no sequence at all is always even")


def _subset(sequences: Sequence[int], of_prefixes: Sequence[int], target: int, units: Sequence[int]) -> list[int]:
    """Those of a rank's sequences (longest first) that make `target` units; a long one is let go sooner than a short one."""
    kept = []
    for sequence, of_shorter in zip(sequences, of_prefixes[-2::-1], strict=True):
        if not of_shorter >> target & 1:
            kept.append(sequence)
            target -= units[sequence]
    return kept
