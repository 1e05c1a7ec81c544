"""Steps that all ranks finish or all ranks leave with an error, so that none waits for one that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

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
