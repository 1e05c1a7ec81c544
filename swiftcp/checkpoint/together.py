"""Steps that all ranks finish or all ranks leave with an error, so that none waits for one that has given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftcp.checkpoint.name_table import NameTable
from swiftcp.errors import CheckpointError


def is_first_rank() -> bool:
    """True on the rank that writes what is written once; True without a process group."""
    return rank_and_size()[0] == 0


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_all(value: Any) -> list[Any]:
    """Every rank's value, in order of rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole_tensors(tensors: Mapping[str, Tensor], table: NameTable, tp_group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, tensor) out of what each tensor-parallel rank holds of parameters, or of their gradients.

    On all ranks of the group, which call it together; one parameter is whole at a time.
    """
    for target, rule in table.pair(list(tensors)).items():
        tensor = tensors[target].detach().contiguous()
        if rule.parallel_dim is not None and tp_group.size() > 1:
            shards = [torch.empty_like(tensor) for _ in range(tp_group.size())]
            dist.all_gather(shards, tensor, group=tp_group)
            tensor = rule.unshard(shards)
        yield from zip(rule.sources, rule.separate(tensor), strict=True)


def from_first_rank(value: Any) -> Any:
    """The first rank's value, on every rank."""
    return gather_all(value if is_first_rank() else None)[0]


@contextmanager
def together(what: str) -> Iterator[None]:
    """Wait for all ranks at the end, and raise on all where one failed. What is inside must not wait for other ranks.

    Raises:
        CheckpointError: another rank failed; the message names rank and error. A rank that failed itself raises its own error.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must hear of it before it goes on
        problem = error
    problems = gather_all(f"{type(problem).__name__}: {problem}" if problem else None)
    if problem is not None:
        raise problem
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if failed:
        raise CheckpointError(f"{what} failed on " + "; ".join(failed))
