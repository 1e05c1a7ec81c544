"""Where towers run: every image and every sound once in a context-parallel group.

The towers themselves (weights, maths) are those of `transformers`. Attention of the vision tower stays inside one frame, that of the
audio tower inside one window of time, so frames and windows (*units*) are spread over the group by cost; one all-gather brings
[main | deepstack levels] back, and its backward sums the gradients of all consumers. With the sum over data and context ranks that
DDP makes, each gradient then counts once.

Every trainable parameter of a tower gets exactly one gradient on every rank in every micro-batch, zeros where a rank has nothing
to encode, and no collective depends on what a rank's data holds. The zeros come in the order of a real backward pass, for overlapped
reduction starts on a bucket of gradients when its last one is ready, and ranks must start on their buckets in one order.

Legend: U units, P patches or frames of log-mel features, D values of each, V features of the micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from swiftcp.data.batch import AudioItems, VisualItems
from swiftcp.parallel.collectives import gather_first_dim

Unit = Sequence[int]
"""What a geometry says of one unit: a row of its `units`."""


class TowerGeometry(Protocol):
    """What the plan of a tower's work needs to know of it."""

    @property
    def num_values(self) -> int:
        """D, values of one row of the tower's input."""
        ...

    def units(self, items: Any) -> Tensor:
        """[U, k] int64: what describes each unit of a micro-batch's `VisualItems` or `AudioItems`, in the order of their rows."""
        ...

    def inputs(self, items: Any) -> Tensor:
        """[P, D] the rows of all units, one unit after the other."""
        ...

    def num_rows(self, unit: Unit) -> int:
        """Rows of the input that a unit has."""
        ...

    def num_features(self, unit: Unit) -> int:
        """Features that the tower makes of a unit."""
        ...

    def multiplications(self, unit: Unit) -> int:
        """Of the forward pass over one unit."""
        ...

    def prepare(self, units: Tensor) -> dict[str, Any]:
        """What else the tower's `encode` takes for [U, k] units, computed on the host."""
        ...


Geometry = Mapping[str, TowerGeometry]
"""Of each tower of a model, by its name: "visual" or "audio", as a batch names what it encodes."""


def layer_multiplications(num_tokens: int, hidden_size: int, intermediate_size: int) -> int:
    """Of one layer over tokens that attend to each other: linear layers, and attention, which is quadratic."""
    return 2 * hidden_size * num_tokens * (2 * hidden_size + intermediate_size + num_tokens)


@dataclass(frozen=True)
class VisionGeometry:
    """See `TowerGeometry`. A unit is a frame: (1, rows, columns) of patches."""

    merge_size: int
    """Patches a side that become one feature."""
    patch_values: int
    """D, values of one flattened patch."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    prepare_grids: Callable[[Tensor], dict[str, Any]]
    """`prepare` for [U, 3] grids of single frames."""

    @property
    def num_values(self) -> int:
        return self.patch_values

    def units(self, items: VisualItems) -> Tensor:
        frames = [[1, height, width] for time, height, width in items.grid_thw.tolist() for _ in range(time)]
        return torch.tensor(frames, dtype=torch.int64).view(-1, 3)

    def inputs(self, items: VisualItems) -> Tensor:
        return items.patches_PD

    def num_rows(self, unit: Unit) -> int:
        return unit[1] * unit[2]

    def num_features(self, unit: Unit) -> int:
        return unit[1] * unit[2] // self.merge_size**2

    def multiplications(self, unit: Unit) -> int:
        return self.num_layers * layer_multiplications(self.num_rows(unit), self.hidden_size, self.intermediate_size)

    def prepare(self, units: Tensor) -> dict[str, Any]:
        return self.prepare_grids(units)


class Tower(Protocol):
    """A tower of `transformers`, with what this module asks of it."""

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(1 + levels, H)."""
        ...

    def parts(self) -> Iterator[nn.Module]:
        """Modules that together have all parameters, in the order in which `encode` uses them."""
        ...

    def encode(self, inputs_PD: Tensor, units: Tensor, prepared: dict[str, Any]) -> Tensor:
        """[features, 1 + levels, H]: the main features, then the deepstack levels."""
        ...


@dataclass(frozen=True)
class TowerWork:
    """What this rank encodes in one micro-batch, and how the group's results come together. Sizes are known on every rank."""

    inputs_PD: Tensor
    units: Tensor
    """[U, k]; see `TowerGeometry.units`."""
    prepared: dict[str, Any]
    """See `TowerGeometry.prepare`."""
    num_features: int
    """Features that this rank encodes; with 0 the tower does not run."""
    gathered_rows: int
    """Rows that each rank hands to the all-gather: the largest number of features of a rank."""
    feature_rows_V: Tensor
    """For each feature of the micro-batch, in stream order, its row in the gathered result."""
    positions_V: Tensor
    """Index of each feature's token into the flattened [B * T] full stream."""

    def map(self, send: Callable[[Tensor], Tensor]) -> TowerWork:
        """The same with `send` applied to the tensors, but for the units: they stay on the host, where the tower reads them."""
        prepared = {name: _map(value, send) for name, value in self.prepared.items()}
        sent: dict[str, Any] = {name: send(getattr(self, name)) for name in ("inputs_PD", "feature_rows_V", "positions_V")}
        return replace(self, prepared=prepared, **sent)


def _map(value: Any, send: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return send(value)
    return value.map(send) if hasattr(value, "map") else value


def spread_units(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Units of each rank, in order, dearest first to the rank with least work so far (Graham 1969). The same on every rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for unit in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        total, rank = heapq.heappop(load)
        shares[rank].append(unit)
        heapq.heappush(load, (total + costs[unit], rank))
    return [sorted(share) for share in shares]


def plan_tower_work(items: VisualItems | AudioItems | None, geometry: TowerGeometry, *, num_ranks: int, rank: int) -> TowerWork:
    """Spread a micro-batch's units over a group and cut out this rank's inputs. Host only; the same plan on every rank."""
    units = [] if items is None else geometry.units(items).tolist()
    starts = torch.tensor([0, *map(geometry.num_rows, units)]).cumsum(0).tolist()
    num_features = [geometry.num_features(unit) for unit in units]
    shares = spread_units([geometry.multiplications(unit) for unit in units], num_ranks)
    gathered_rows = max(sum(num_features[u] for u in share) for share in shares)
    feature_rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * (len(units) + 1)
    for owner, share in enumerate(shares):
        row = owner * gathered_rows
        for unit in share:
            feature_rows[unit] = torch.arange(row, row + num_features[unit])
            row += num_features[unit]
    mine = shares[rank]
    if mine:
        assert items is not None
        inputs_PD = geometry.inputs(items)
        inputs, own = torch.cat([inputs_PD[starts[u] : starts[u + 1]] for u in mine]), torch.tensor([units[u] for u in mine])
    else:
        inputs, own = torch.empty(0, geometry.num_values), torch.empty(0, 0, dtype=torch.int64)
    return TowerWork(
        inputs_PD=inputs,
        units=own,
        prepared=geometry.prepare(own) if mine else {},
        num_features=sum(num_features[u] for u in mine),
        gathered_rows=gathered_rows,
        feature_rows_V=torch.cat(feature_rows),
        positions_V=torch.empty(0, dtype=torch.int64) if items is None else items.positions,
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
    """[0, 1 + levels, H], the features of nothing, without the tower's run (100 ms on one H200)."""
    features = torch.empty(0, *tower.feature_shape, dtype=dtype, device=device)
    for part in tower.parts():
        features = _WithoutUse.apply(features, *part.parameters())
    return features


def encode(tower: Tower, work: TowerWork, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """Features of all that the tower has to encode in the micro-batch, on every rank of the group.

    Returns:
        [V, 1 + levels, H] in `dtype`: the main features, then the deepstack levels.
    """
    if work.num_features:
        local = tower.encode(work.inputs_PD, work.units, work.prepared).to(dtype)
    else:
        local = _no_features(tower, dtype, work.feature_rows_V.device)
    if group.size() > 1:
        padding = work.gathered_rows - work.num_features
        local = gather_first_dim(F.pad(local, (0, 0, 0, 0, 0, padding)), group)
    return local.index_select(0, work.feature_rows_V)
