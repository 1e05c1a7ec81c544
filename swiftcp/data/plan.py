"""Which rows make up which pack, and which packs which step: pure functions of lengths and seed, never of the layout.

A *pack* is a tuple of places in the data set; without packing it holds one. The packs of all epochs form one stream, which is cut
into steps of `global_batch_size` packs. The pack of (step, micro-batch, data-parallel rank) follows from the step alone, so a step
holds the same packs under every layout; data-parallel ranks share them out by cost. Where the stream ends within a step, empty
packs fill it: every rank has as many micro-batches, and every row is seen exactly once an epoch.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from threading import RLock

from swiftcp.errors import ConfigError

Pack = tuple[int, ...]
FILLER: Pack = ()

_WINDOW = 4096
"""Rows among which packs are formed: enough to fill packs to about 0.99, few enough that epochs mix rows anew."""

_EVEN_LENGTH = 32_768
"""Tokens of a row at which causal attention costs as much as the matrices: about the 2B shape's; larger models have a larger one."""


def padded_length(length: int, pack_align: int) -> int:
    return -(-length // pack_align) * pack_align


def plan_packs(lengths: Sequence[int], *, seed: int, epoch: int, packing_length: int, pack_align: int) -> list[Pack]:
    """The packs of one epoch, in the order in which they are trained; every row is in exactly one.

    Rows are shuffled, and each window of them is packed, longest rows first, each into the fullest pack with room for its padded
    length (best fit decreasing); then the packs are shuffled. O(n log n).

    Raises:
        ConfigError: a row does not fit into `packing_length` once padded.
    """
    longest = max(lengths, default=0)
    if padded_length(longest, pack_align) > packing_length:
        raise ConfigError(
            f"a row of {longest} tokens, padded to pack_align {pack_align}, does not fit packing_length {packing_length}: "
            f"set packing_length to at least {padded_length(longest, pack_align)}"
        )
    order = _shuffled(range(len(lengths)), f"rows {seed} {epoch}")
    capacity = packing_length // pack_align
    units = [-(-length // pack_align) for length in lengths]
    packs = []
    for begin in range(0, len(order), _WINDOW):
        window = sorted(order[begin : begin + _WINDOW], key=lambda row: -units[row])
        packs += _best_fit(window, units, capacity)
    return _shuffled(packs, f"packs {seed} {epoch}")


def _best_fit(rows: Sequence[int], units: Sequence[int], capacity: int) -> list[Pack]:
    """Put each row, in turn, into the pack with the least room that still holds it. `capacity` and `units` count in `pack_align`."""
    packs: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where some pack has r units of room: finding the best fit is one bit operation
    for row in rows:
        fitting = rooms >> units[row]
        if fitting:
            room = units[row] + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            rooms &= ~(not by_room[room] and 1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(row)
        by_room[room - units[row]].append(pack)
        rooms |= 1 << room - units[row]
    return [tuple(pack) for pack in packs]


def plan_rows(num_rows: int, *, seed: int, epoch: int) -> list[Pack]:
    """The rows of one epoch, shuffled, each a pack of its own."""
    return [(row,) for row in _shuffled(range(num_rows), f"rows {seed} {epoch}")]


def plan_in_order(lengths: Sequence[int], *, packing_length: int | None, pack_align: int) -> list[Pack]:
    """All rows in their order, for evaluation: a pack is closed when the next row does not fit; None gives a pack a row."""
    packs: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths):
        padded = padded_length(length, pack_align)
        if packing_length is None or padded > room or not packs:
            packs.append([])
            room = packing_length or 0
        packs[-1].append(row)
        room -= padded
    return [tuple(pack) for pack in packs]


def _shuffled[T](items: Sequence[T], seed: str) -> list[T]:
    """Python's own generator: the same order on every platform, whatever else draws random numbers."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


class StepPlan:
    """The steps of a whole run. Epochs are planned when they are reached, and any rank makes the same plan.

    Threads may share one: batches are read ahead while the training loop asks where it stands.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        seed: int,
        global_batch_size: int,
        packing_length: int | None,
        pack_align: int,
        num_train_epochs: int | None = None,
        train_iters: int | None = None,
    ) -> None:
        """
        Args:
            lengths: tokens of each row of the data set.
            global_batch_size: packs of one step.
            packing_length: None for no packing: a pack is one row.
            train_iters: steps; in place of `num_train_epochs`.

        Raises:
            ConfigError: there are no rows, one does not fit, or both or neither of the last two are given.
        """
        if (num_train_epochs is None) == (train_iters is None):
            raise ConfigError("give either num_train_epochs or train_iters")
        if not lengths:
            raise ConfigError("the data set holds no rows to train on")
        self.lengths = tuple(lengths)
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.packing_length = packing_length
        self.pack_align = pack_align
        self.num_train_epochs = num_train_epochs
        self._first_packs = [0]
        self._planned: dict[int, list[Pack]] = {}
        self._lock = RLock()
        self.num_steps = -(-self._first_pack(num_train_epochs or 0) // global_batch_size) if train_iters is None else train_iters

    def step(self, step: int) -> list[Pack]:
        """The packs of a step, 0-based: `global_batch_size` of them, fillers last.

        Raises:
            IndexError: there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        first = step * self.global_batch_size
        epoch = self._epoch_of(first)
        begin = first - self._first_pack(epoch)
        packs = self._packs(epoch)[begin : begin + self.global_batch_size]
        while len(packs) < self.global_batch_size and epoch + 1 != self.num_train_epochs:
            epoch += 1
            packs = packs + self._packs(epoch)[: self.global_batch_size - len(packs)]
        return packs + [FILLER] * (self.global_batch_size - len(packs))

    def epochs_before(self, step: int) -> float:
        """Epochs trained before a step, as a share of their packs."""
        first = step * self.global_batch_size
        epoch = self._epoch_of(first)
        size = self._first_pack(epoch + 1) - self._first_pack(epoch)
        return epoch + min(1.0, (first - self._first_pack(epoch)) / size)

    def plan_hash(self) -> str:
        """Equal on ranks that will train the same packs in the same order."""
        figures = (self.seed, self.global_batch_size, self.packing_length, self.pack_align, self.num_train_epochs, self.num_steps)
        return hashlib.sha256(repr((figures, self.lengths, self._packs(0))).encode()).hexdigest()

    def fill(self, epoch: int = 0) -> float:
        """Real tokens over padded tokens of an epoch: packs padded to `packing_length`, or rows to `pack_align`."""
        if self.packing_length is None:
            return sum(self.lengths) / sum(padded_length(length, self.pack_align) for length in self.lengths)
        return sum(self.lengths) / (len(self._packs(epoch)) * self.packing_length)

    def _epoch_of(self, pack: int) -> int:
        """The epoch of a pack of the stream; of what lies behind it, the last."""
        epoch = 0
        while self._first_pack(epoch + 1) <= pack and epoch + 1 != self.num_train_epochs:
            epoch += 1
        return epoch

    def _first_pack(self, epoch: int) -> int:
        """Packs of all earlier epochs."""
        with self._lock:
            while len(self._first_packs) <= epoch:
                earlier = len(self._first_packs) - 1
                size = len(self.lengths) if self.packing_length is None else len(self._packs(earlier))
                self._first_packs.append(self._first_packs[-1] + size)
            return self._first_packs[epoch]

    def _packs(self, epoch: int) -> list[Pack]:
        with self._lock:
            if epoch not in self._planned:
                if len(self._planned) > 1:  # a step touches two epochs, rarely more: keep no others
                    del self._planned[min(self._planned)]
                self._planned[epoch] = self._plan(epoch)
            return self._planned[epoch]

    def _plan(self, epoch: int) -> list[Pack]:
        if self.packing_length is None:
            return plan_rows(len(self.lengths), seed=self.seed, epoch=epoch)
        return plan_packs(self.lengths, seed=self.seed, epoch=epoch, packing_length=self.packing_length, pack_align=self.pack_align)


def pack_cost(pack: Pack, lengths: Sequence[int]) -> float:
    """Of training on a pack, in tokens of a short row: the matrices take each token alike, attention takes it with all before it."""
    return sum(lengths[row] * (1 + lengths[row] / _EVEN_LENGTH) for row in pack)


def balanced(packs: Sequence[Pack], lengths: Sequence[int], *, dp_size: int, micro_batch_size: int) -> list[Pack]:
    """The packs of a step in an order in which `packs_of_rank` gives ranks work of like cost.

    Micro-batches are the same ones: only which rank takes which, and when, changes. Those that ranks take at one time are neighbours in
    cost, for ranks may wait for each other there (experts), and in each such round the costliest goes to the rank with the least so far.
    """
    micro_batches = list(itertools.batched(packs, micro_batch_size))
    if dp_size == 1 or len(micro_batches) % dp_size:
        return list(packs)
    costs = {number: sum(pack_cost(pack, lengths) for pack in own) for number, own in enumerate(micro_batches)}
    loads = [0.0] * dp_size
    order: list[int] = []
    for in_round in itertools.batched(sorted(costs, key=lambda number: -costs[number]), dp_size):
        by_load = sorted(range(dp_size), key=lambda rank: loads[rank])
        taken = dict(zip(by_load, in_round, strict=True))
        order += [taken[rank] for rank in range(dp_size)]
        loads = [load + costs[taken[rank]] for rank, load in enumerate(loads)]
    return [pack for number in order for pack in micro_batches[number]]


def packs_of_rank(packs: Sequence[Pack], *, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[tuple[Pack, ...]]:
    """The micro-batches of one data-parallel rank in a step: consecutive packs are spread over the ranks in turn.

    Raises:
        ConfigError: the step does not divide into equally many micro-batches for every rank.
    """
    share = dp_size * micro_batch_size
    if len(packs) % share:
        raise ConfigError(
            f"global_batch_size {len(packs)} is no multiple of dp {dp_size} x micro_batch_size {micro_batch_size} = {share}: "
            f"set {-(-len(packs) // share) * share}"
        )
    begins = range(dp_rank * micro_batch_size, len(packs), share)
    return [tuple(packs[begin : begin + micro_batch_size]) for begin in begins]
