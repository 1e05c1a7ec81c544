"""Steps that all ranks finish or all ranks leave with an error, so that none waits for one that has given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftcp.checkpoint.name_table import NameTable, Rule
from swiftcp.errors import CheckpointError
from swiftcp.parallel.mesh import Mesh


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


def whole_tensors(tensors: Mapping[str, Tensor], table: NameTable, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, tensor) out of what each rank of a pipeline stage holds of parameters, or of their gradients.

    On all ranks of the stage, which call it together; one parameter is whole at a time, or the experts of one layer.
    """
    rules = table.pair(list(tensors))
    awaited = Counter(name for rule in rules.values() if rule.is_expert for name in rule.sources)
    others = _names_of_other_experts(rules.values(), mesh)
    fused: dict[str, Tensor] = {}
    for target, rule in rules.items():
        tensor = _unsharded(tensors[target].detach().contiguous(), rule, mesh.expert_tp_group if rule.is_expert else mesh.tp_group)
        if not rule.is_expert:
            yield from rule.by_source(tensor).items()
            continue
        parts = zip(rule.sources, rule.separate(tensor), strict=True)
        shapes, slices = rule.source_shapes(tensor.shape), rule.source_slices(tensor.shape, 0, 1)
        for (name, part), shape, index in zip(parts, shapes, slices, strict=True):
            if not index:
                yield from zip(others.pop(name), _gathered(part.contiguous(), mesh.ep_group), strict=True)
                continue
            if name not in fused:
                fused[name] = part.new_zeros(shape)
            fused[name][index] = part
            awaited[name] -= 1
            if not awaited[name]:
                dist.all_reduce(fused[name], group=mesh.ep_group)  # zeros where other ranks have their experts
                yield name, fused.pop(name)


def _names_of_other_experts(rules: Iterable[Rule], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """For each tensor of an expert here: those that stand in its place on the ranks that have other experts, by rank."""
    own = [name for rule in rules if rule.is_expert for name in rule.sources]
    of_ranks: list[Any] = [None] * mesh.ep_group.size()
    if own:
        dist.all_gather_object(of_ranks, own, group=mesh.ep_group)
    return dict(zip(own, zip(*of_ranks, strict=True), strict=True)) if own else {}


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def _unsharded(tensor: Tensor, rule: Rule, group: dist.ProcessGroup) -> Tensor:
    if rule.parallel_dim is None or group.size() == 1:
        return tensor
    return rule.unshard(_gathered(tensor, group))


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
