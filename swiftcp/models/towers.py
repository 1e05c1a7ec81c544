"""Where the vision tower runs: every image once in a context-parallel group.

The tower itself (weights, maths) is that of `transformers`. Its attention stays inside one frame, so frames are spread over
the group by cost; one all-gather brings [main | deepstack levels] back, and its backward sums the gradients of all consumers.
With the sum over data and context ranks that DDP makes, each gradient then counts once.

Every trainable parameter of the tower gets exactly one gradient on every rank in every micro-batch, zeros where a rank has nothing
to encode, and no collective depends on what a rank's data holds. The zeros come in the order of a real backward pass, for overlapped
reduction starts on a bucket of gradients when its last one is ready, and ranks must start on their buckets in one order.

Legend: U frames, P patches, D values of a patch, V merged features of the micro-batch, W width of [main | levels].
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from swiftcp.data.batch import VisualItems
from swiftcp.parallel.collectives import gather_first_dim


@dataclass(frozen=True)
class TowerGeometry:
    """What the plan of a tower's work needs to know of it."""

    merge_size: int
    """Patches a side that become one feature."""
    patch_values: int
    """D, values of one flattened patch."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    prepare: Callable[[Tensor], dict[str, Any]]
    """What else the tower's `encode` takes for [U, 3] grids of single frames, computed on the host."""

    def frame_cost(self, num_patches: int) -> int:
        """Proportional to the multiplications of one layer: linear layers, and attention inside the frame, quadratic."""
        return num_patches * (2 * self.hidden_size + self.intermediate_size + num_patches)


class Tower(Protocol):
    """A vision tower of `transformers`, with what this module asks of it."""

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(1 + levels, H)."""
        ...

    def parts(self) -> Iterator[nn.Module]:
        """Modules that together have all parameters, in the order in which `encode` uses them."""
        ...

    def encode(self, patches_PD: Tensor, grid_thw: Tensor, prepared: dict[str, Any]) -> Tensor:
        """[features, 1 + levels, H]: the main features, then the deepstack levels."""
        ...


@dataclass(frozen=True)
class TowerWork:
    """What this rank encodes in one micro-batch, and how the group's results come together. Sizes are known on every rank."""

    patches_PD: Tensor
    grid_thw: Tensor
    """[U, 3], one frame each."""
    prepared: dict[str, Any]
    """See `TowerGeometry.prepare`."""
    num_features: int
    """Features that this rank encodes; with 0 the tower does not run."""
    gathered_rows: int
    """Rows that each rank hands to the all-gather: the largest number of features of a rank."""
    feature_rows_V: Tensor
    """For each feature of the micro-batch, in stream order, its row in the gathered result."""

    def map(self, send: Callable[[Tensor], Tensor]) -> TowerWork:
        """The same with `send` applied to the tensors, but for the grids: they stay on the host, where the tower reads them."""
        prepared = {name: _map(value, send) for name, value in self.prepared.items()}
        return replace(self, patches_PD=send(self.patches_PD), prepared=prepared, feature_rows_V=send(self.feature_rows_V))


def _map(value: Any, send: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return send(value)
    return value.map(send) if hasattr(value, "map") else value


def spread_frames(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Frames of each rank, in order, dearest first to the rank with least work so far (Graham 1969). The same on every rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for frame in sorted(range(len(costs)), key=lambda f: (-costs[f], f)):
        total, rank = heapq.heappop(load)
        shares[rank].append(frame)
        heapq.heappush(load, (total + costs[frame], rank))
    return [sorted(share) for share in shares]


def _frames(grid_thw: Tensor) -> list[tuple[int, int]]:
    return [(height, width) for time, height, width in grid_thw.tolist() for _ in range(time)]


def plan_tower_work(items: VisualItems | None, geometry: TowerGeometry, *, num_ranks: int, rank: int) -> TowerWork:
    """Spread a micro-batch's frames over a group and cut out this rank's patches. Host only; the same plan on every rank."""
    frames = [] if items is None else _frames(items.grid_thw)
    num_patches = [height * width for height, width in frames]
    patch_starts = torch.tensor([0, *num_patches]).cumsum(0).tolist()
    merged = [patches // geometry.merge_size**2 for patches in num_patches]
    shares = spread_frames([geometry.frame_cost(patches) for patches in num_patches], num_ranks)
    gathered_rows = max(sum(merged[f] for f in share) for share in shares)
    feature_rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(frames)
    for owner, share in enumerate(shares):
        row = owner * gathered_rows
        for frame in share:
            feature_rows[frame] = torch.arange(row, row + merged[frame])
            row += merged[frame]
    mine = shares[rank]
    if mine:
        assert items is not None
        patches = torch.cat([items.patches_PD[patch_starts[f] : patch_starts[f + 1]] for f in mine])
        grid = torch.tensor([[1, *frames[f]] for f in mine])
    else:
        patches, grid = torch.empty(0, geometry.patch_values), torch.empty(0, 3, dtype=torch.int64)
    return TowerWork(
        patches_PD=patches,
        grid_thw=grid,
        prepared=geometry.prepare(grid) if mine else {},
        num_features=sum(merged[f] for f in mine),
        gathered_rows=gathered_rows,
        feature_rows_V=torch.cat(feature_rows) if feature_rows else torch.empty(0, dtype=torch.int64),
    )


class _WithoutUse(torch.autograd.Function):
    """Hands values on; in the backward pass the parameters get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parameters = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grads[0], *(torch.zeros_like(parameter) if needed else None for parameter, needed in parameters)


def _no_features(tower: Tower, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[0, 1 + levels, H], the features of no frame, without the tower's run (100 ms on one H200)."""
    features = torch.empty(0, *tower.feature_shape, dtype=dtype, device=device)
    for part in tower.parts():
        features = _WithoutUse.apply(features, *part.parameters())
    return features


def encode(tower: Tower, work: TowerWork, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """Features of all the micro-batch's images and videos, on every rank of the group.

    Returns:
        [V, 1 + levels, H] in `dtype`: the main features, then the deepstack levels.
    """
    if work.num_features:
        local = tower.encode(work.patches_PD, work.grid_thw, work.prepared).to(dtype)
    else:
        local = _no_features(tower, dtype, work.feature_rows_V.device)
    if group.size() > 1:
        padding = work.gathered_rows - work.num_features
        local = gather_first_dim(F.pad(local, (0, 0, 0, 0, 0, padding)), group)
    return local.index_select(0, work.feature_rows_V)
