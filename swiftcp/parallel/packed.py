"""The description of a packed or padded stream that every attention layer receives."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from swiftcp.parallel.context import stream_order
from swiftcp.parallel.partition import CUT, Partition


@dataclass(frozen=True)
class SequenceGroup:
    """The sequences of a pack that have one length, so that attention takes them as one batch of n."""

    length: int
    """L, padded tokens of each sequence."""
    local_slots: Tensor
    """[n * L / CP] int64: their tokens in the local stream."""
    gathered_slots: Tensor
    """[n * L] int64: their tokens, in order, in the concatenation of all ranks' local streams."""


@dataclass(frozen=True)
class StreamParts:
    """The two parts of a local stream in which some sequences are whole: those, then the chunks of sequences that are cut."""

    partition: Partition
    num_whole: int
    """Local tokens of whole sequences; the same on all ranks, and more than none."""
    whole: PackedStream
    """This rank's own."""
    cut: PackedStream | None
    """In lengths of the full sequences; None where no sequence is cut."""

    @staticmethod
    def of(partition: Partition, cp_rank: int) -> StreamParts:
        whole, cut = partition.lengths(cp_rank), partition.lengths(CUT)
        return StreamParts(partition, sum(whole), PackedStream.of(whole), PackedStream.of(cut) if cut else None)

    def map(self, send: Callable[[Tensor], Tensor]) -> StreamParts:
        """The same with `send` applied to what the device needs."""
        cut = None if self.cut is None else self.cut.map(send)
        return StreamParts(self.partition.map(send), self.num_whole, self.whole.map(send), cut)


class PackedStream(PackedSeqParams):
    """megatron-core's description of a pack, with the lengths on the host, so that no layer asks the device for them.

    One int32 tensor serves as all four `cu_seqlens` fields, for Transformer Engine compares them by identity, and padding
    behind a causal sequence cannot reach it (`pad_between_seqs=False`).
    """

    def __init__(self, cu_seqlens: Tensor, host_ends: tuple[int, ...], max_seqlen: int, parts: StreamParts | None = None) -> None:
        """
        Args:
            cu_seqlens: [n + 1] int32 on the device, of the full stream; `host_ends` are the same numbers.
            max_seqlen: in padded tokens of the full stream.
            parts: None where every sequence is cut.
        """
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            pad_between_seqs=False,
        )
        self.host_ends = host_ends
        self.parts = parts
        self._groups: dict[int, list[SequenceGroup]] = {}
        self._inverse_of_groups: dict[int, Tensor] = {}
        self._orders: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def of(lengths: Sequence[int]) -> PackedStream:
        """On the host."""
        ends = (0, *itertools.accumulate(lengths))
        return PackedStream(torch.tensor(ends, dtype=torch.int32), ends, max(lengths))

    def map(self, send: Callable[[Tensor], Tensor]) -> PackedStream:
        """The same with `send` applied to what the device needs."""
        parts = None if self.parts is None else self.parts.map(send)
        return PackedStream(send(self.cu_seqlens_q), self.host_ends, self.max_seqlen_q, parts)

    @property
    def sequences(self) -> Tensor | Partition:
        """What `swiftcp.parallel.context` cuts the full stream by, and puts it together again."""
        return self.cu_seqlens_q if self.parts is None else self.parts.partition

    @cached_property
    def num_tokens(self) -> int:
        return self.host_ends[-1]

    def groups(self, cp_size: int) -> list[SequenceGroup]:
        """The pack's sequences by length; computed once for a pack."""
        if cp_size not in self._groups:
            self._groups[cp_size] = self._group(cp_size)
        return self._groups[cp_size]

    def inverse_of_groups(self, cp_size: int) -> Tensor:
        """[T] int64: where each token of the concatenation of all ranks' streams lies behind the groups' `gathered_slots`."""
        if cp_size not in self._inverse_of_groups:
            self._inverse_of_groups[cp_size] = torch.cat([group.gathered_slots for group in self.groups(cp_size)]).argsort()
        return self._inverse_of_groups[cp_size]

    def orders(self, cp_size: int) -> tuple[Tensor, Tensor]:
        """[T] int64 both: where each token of the full stream lies in the concatenation of all ranks' streams, and the inverse."""
        if cp_size not in self._orders:
            order = stream_order(self.sequences, self.num_tokens, cp_size=cp_size, device=self.cu_seqlens_q.device)
            self._orders[cp_size] = order, order.argsort()
        return self._orders[cp_size]

    def _group(self, cp_size: int) -> list[SequenceGroup]:
        starts_by_length: dict[int, list[int]] = defaultdict(list)
        for start, end in itertools.pairwise(self.host_ends):
            if end > start:
                starts_by_length[end - start].append(start)
        device = self.cu_seqlens_q.device
        order, _ = self.orders(cp_size)
        groups = []
        for length, starts in starts_by_length.items():
            starts_n1 = torch.tensor(starts, device=device)[:, None]
            groups.append(
                SequenceGroup(
                    length=length,
                    local_slots=(starts_n1 // cp_size + torch.arange(length // cp_size, device=device)).flatten(),
                    gathered_slots=order[(starts_n1 + torch.arange(length, device=device)).flatten()],
                )
            )
        return groups
