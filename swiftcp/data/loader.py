"""The micro-batches of one data-parallel rank, in the order of the plan, read ahead by worker processes.

A micro-batch follows from its step alone, so starting at a step is resuming there: no state of readers has to be saved. Samples are
made from rows without any random draw, and so are the same with any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swiftcp.data.batch import Batch, Sample, collate_pack, collate_rows
from swiftcp.data.dataset import EncodedDataset
from swiftcp.data.plan import FILLER, Pack, StepPlan, balanced, packs_of_rank, plan_in_order
from swiftcp.data.rows import BadRow
from swiftcp.data.workers import map_in_order


@dataclass(frozen=True)
class BatchLayout:
    """How packs become the micro-batches of one rank."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    """Packs of a micro-batch (they follow each other in one stream), or rows without packing."""
    packing_length: int | None
    """None: no packing."""
    pack_align: int
    full_packs: bool = False
    """Pad every pack to `packing_length`, so that shapes never vary."""
    batch_multiple: int = 1
    """Of a rank's micro-batches: interleaved pipeline stages take them in groups as large as the pipeline is long."""
    length_multiple: int = 1
    """Tokens of a pack, or of each padded row, are a multiple of it: what the layout needs beyond `pack_align`, padded at the end."""

    def of_rank(self, packs: list[Pack]) -> list[tuple[Pack, ...]]:
        """This rank's micro-batches of a step."""
        return packs_of_rank(packs, dp_rank=self.dp_rank, dp_size=self.dp_size, micro_batch_size=self.micro_batch_size)

    def balanced(self, packs: Sequence[Pack], lengths: Sequence[int]) -> list[Pack]:
        """A step's packs in an order in which `of_rank` gives ranks work of like cost."""
        return balanced(packs, lengths, dp_size=self.dp_size, micro_batch_size=self.micro_batch_size)

    def in_order(self, lengths: Sequence[int]) -> list[tuple[Pack, ...]]:
        """This rank's micro-batches of all rows once, in order.

        Every rank gets equally many, a multiple of `batch_multiple`; the last may be fillers.
        """
        packs = plan_in_order(lengths, packing_length=self.packing_length, pack_align=self.pack_align)
        packs += [FILLER] * (-len(packs) % (self.dp_size * self.micro_batch_size * self.batch_multiple))
        return self.of_rank(packs)

    def collate(self, samples: Sequence[Sample], pad_token_id: int) -> Batch:
        """The samples of one micro-batch."""
        padding = dict(pack_align=self.pack_align, pad_token_id=pad_token_id, length_multiple=self.length_multiple)
        if self.packing_length is None:
            return collate_rows(samples, num_rows=self.micro_batch_size, **padding)
        total = self.micro_batch_size * self.packing_length if self.full_packs else None
        return collate_pack(samples, total_length=total, **padding)


Agree = Callable[[Mapping[int, BadRow]], Mapping[int, BadRow]]
"""(rows of this rank's micro-batch that could not be decoded) -> those of all ranks' micro-batches; called on all ranks together."""


@dataclass(frozen=True)
class _Job:
    """What one micro-batch is made from."""

    packs: tuple[Pack, ...]
    mean_labels: float | None = None
    """Of the micro-batches of its global batch."""
    bad: Mapping[int, BadRow] = field(default_factory=dict)
    """Rows that another rank could not decode."""


class _MakeBatch:
    """The batch of one micro-batch; what worker processes run."""

    def __init__(self, dataset: EncodedDataset, layout: BatchLayout) -> None:
        self._dataset, self._layout = dataset, layout

    def __call__(self, job: _Job) -> Batch:
        samples = [self._dataset.sample(place, job.bad) for pack in job.packs for place in pack]
        return replace(self._layout.collate(samples, self._dataset.encoder.pad_token_id), mean_labels=job.mean_labels)


def _read(make: _MakeBatch, jobs: Iterator[_Job], num_workers: int, agree: Agree | None) -> Iterator[Batch]:
    """The batches of the jobs. With `agree`, a row that one rank could not decode is padding on all of them."""
    if agree is None:
        yield from map_in_order(make, jobs, num_workers=num_workers)
        return
    jobs, same_jobs = itertools.tee(jobs)
    for job, batch in zip(same_jobs, map_in_order(make, jobs, num_workers=num_workers), strict=True):
        bad = agree(batch.bad_rows)
        others = {row: bad[row] for row in bad.keys() & set(batch.rows)}
        yield batch if others.keys() == batch.bad_rows.keys() else make(replace(job, bad=others))


def mean_labels(packs: Sequence[Pack], labels: Sequence[int], micro_batch_size: int) -> float:
    """Labelled tokens of a micro-batch, on average over those that hold rows; the same in every layout.

    Args:
        packs: of a global batch.
        labels: labelled tokens of each row of the data set.
    """
    num_filled = sum(any(micro_batch) for micro_batch in itertools.batched(packs, micro_batch_size))
    return sum(labels[place] for pack in packs for place in pack) / max(num_filled, 1)


class BatchStream:
    """Iterates over this rank's micro-batches of a run, step by step; every rank gets equally many."""

    def __init__(
        self,
        dataset: EncodedDataset,
        plan: StepPlan,
        layout: BatchLayout,
        *,
        start_step: int = 0,
        num_workers: int = 0,
        agree: Agree | None = None,
    ) -> None:
        """
        Args:
            plan: of `dataset.lengths`, with the layout's `packing_length` and `pack_align`.
            start_step: the first step to read, 0-based.
            agree: how ranks tell each other of rows that could not be decoded, where that is no error.

        Raises:
            ConfigError: a step does not divide among the ranks.
        """
        assert plan.lengths == dataset.lengths
        assert (plan.packing_length, plan.pack_align) == (layout.packing_length, layout.pack_align)
        self.num_micro_batches = len(layout.of_rank([FILLER] * plan.global_batch_size))
        """In each step."""
        self._dataset, self._plan, self._layout = dataset, plan, layout
        self._start_step, self._num_workers, self._agree = start_step, num_workers, agree

    def __iter__(self) -> Iterator[Batch]:
        return _read(_MakeBatch(self._dataset, self._layout), self._micro_batches(), self._num_workers, self._agree)

    def _micro_batches(self) -> Iterator[_Job]:
        for step in range(self._start_step, self._plan.num_steps):
            packs = self._plan.step(step)
            mean = mean_labels(packs, self._dataset.labels, self._layout.micro_batch_size)
            yield from (_Job(own, mean) for own in self._layout.of_rank(self._layout.balanced(packs, self._plan.lengths)))


def batches_in_order(dataset: EncodedDataset, layout: BatchLayout, *, num_workers: int = 0, agree: Agree | None = None) -> Iterator[Batch]:
    """All rows once, in order, for evaluation and log-probabilities; neighbouring packs go to the ranks in turn.

    Every rank gets equally many micro-batches; the last ones may be fillers.
    """
    return _read(_MakeBatch(dataset, layout), map(_Job, layout.in_order(dataset.lengths)), num_workers, agree)
