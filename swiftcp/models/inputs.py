"""What one rank hands to `MultimodalGPTModel` for one micro-batch, made on the host from the full stream.

All counts and indices are computed here, from tensors on the host, so that the model never waits for the device. Everything
local is cut by `split_cp_inputs`; nothing is counted from local ids. Tensor-parallel ranks get the same, but for the deepstack places.

Legend: B rows (1 when packed), T tokens of the full stream, S local tokens (T / CP), N labelled local tokens, V visual
features of the micro-batch, W those whose token is local. A *slot* is a place in the flattened [S * B] local hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import IGNORED_LABEL, Batch
from swiftcp.models.towers import Geometry, TowerWork, plan_tower_work
from swiftcp.parallel.context import split_cp_inputs
from swiftcp.parallel.mesh import Mesh
from swiftcp.parallel.packed import PackedStream, StreamParts
from swiftcp.parallel.partition import COSTS, CUT, Partition, plan_partition, zigzag_partition

logger = logging.getLogger(__name__)

_REPORTED: set[bool] = set()
"""Whether a pack with sequences that stay whole (True), or one without (False), has been reported."""


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch on this rank's device."""

    input_ids_BT: Tensor
    cu_seqlens: Tensor | Partition | None
    """What the full stream is cut by; None for padded rows."""
    packed: PackedStream | None
    position_ids_3BS: Tensor
    padding_mask_BS: Tensor
    """[B, S / TP under sequence parallelism] bool, True at padding, for routers: padding takes no part in their losses."""
    tower_work: Mapping[str, TowerWork]
    """Of each tower, by its name; none on later pipeline stages."""
    local_features_W: Tensor
    """Which of the V visual features have their token on this rank."""
    local_visual_slots_W: Tensor
    """The slots of those tokens; under sequence parallelism of this tensor-parallel rank's share of them, in its part of the stream."""
    visual_shares: tuple[int, ...] | None
    """Under sequence parallelism, how many of the W each tensor-parallel rank owns: consecutive ones, for they stand in stream order."""
    label_slots_N: Tensor
    targets_N: Tensor
    """int64: the token that each labelled slot must predict."""
    weights_N: Tensor
    """float32 weight of each labelled token's loss."""
    label_positions_N: Tensor
    """On the host: index of each labelled slot into the flattened [B * T] full stream."""

    def map(self, send: Callable[[Tensor], Tensor]) -> ModelInputs:
        """The same with `send` applied to what the device needs."""
        host = {"label_positions_N", "cu_seqlens"}
        sent: dict[str, Any] = {name: send(value) for name, value in vars(self).items() if isinstance(value, Tensor) and name not in host}
        packed = None if self.packed is None else self.packed.map(send)
        work = {name: own.map(send) for name, own in self.tower_work.items()}
        return replace(self, **sent, packed=packed, cu_seqlens=None if packed is None else packed.sequences, tower_work=work)

    def pin(self) -> ModelInputs:
        """In page-locked memory, from where copies to a GPU run beside its work."""
        return self.map(Tensor.pin_memory)

    def to(self, device: torch.device) -> ModelInputs:
        return self.map(lambda values: values.to(device, non_blocking=True))

    @property
    def num_labels(self) -> int:
        """Labelled tokens of this rank: label not ignored, weight above 0."""
        return self.label_slots_N.numel()


def _slots(mask_BS: Tensor) -> Tensor:
    """Places of the true entries in the flattened [S * B] stream, in stream order."""
    return mask_BS.t().flatten().nonzero().flatten()


def _at(values_BS: Tensor, slots: Tensor) -> Tensor:
    return values_BS.t().flatten()[slots]


def local_labels(batch: Batch, cu_seqlens: Tensor | Partition | None, *, cp_size: int, cp_rank: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the labels and their weights, [B, S]. They were shifted on the full stream, before this cut."""
    labels_BS = split_cp_inputs(batch.labels_BS, cu_seqlens, -1, cp_size=cp_size, cp_rank=cp_rank)
    weights_BS = split_cp_inputs(batch.weights_BS, cu_seqlens, -1, cp_size=cp_size, cp_rank=cp_rank)
    assert labels_BS is not None and weights_BS is not None
    return labels_BS, weights_BS


def _visual_share(slots_W: Tensor, num_slots: int, mesh: Mesh) -> tuple[Tensor, tuple[int, ...] | None]:
    """This tensor-parallel rank's slots in its own part of the `num_slots` local ones, and how many of W each such rank has."""
    if not mesh.sequence_parallel:
        return slots_W, None
    if num_slots % mesh.tp_size:
        raise ValueError(f"{num_slots} tokens of a rank do not spread evenly over tp: pad to a multiple of {mesh.tp_size}")
    part = num_slots // mesh.tp_size
    shares = torch.bincount(slots_W // part, minlength=mesh.tp_size).tolist()
    return slots_W.split(shares)[mesh.tp_rank] - mesh.tp_rank * part, tuple(shares)


def _sequence_share(values_BS: Tensor, mesh: Mesh) -> Tensor:
    """What of the local tokens this tensor-parallel rank has between the matrices."""
    return values_BS.chunk(mesh.tp_size, dim=1)[mesh.tp_rank] if mesh.sequence_parallel else values_BS


def make_inputs(batch: Batch, mesh: Mesh, geometry: Geometry) -> ModelInputs:
    """Cut one micro-batch for this rank and send it to the rank's device; see `plan_inputs`."""
    return plan_inputs(batch, mesh, geometry).to(mesh.device)


def _report(partition: Partition | None, ends: tuple[int, ...], mesh: Mesh) -> None:
    """Say what is done with the first pack of each kind."""
    kept = partition is not None
    if mesh.rank != 0 or kept in _REPORTED:
        return
    _REPORTED.add(kept)
    if partition is None:
        what = "every sequence of this pack is cut (zigzag)"
    else:
        num_cut = sum(partition.lengths(CUT))
        saved = 1 - COSTS.seconds(partition) / COSTS.seconds(zigzag_partition(ends, mesh.cp_size))
        what = (
            f"{ends[-1] - num_cut:,} of this pack's {ends[-1]:,} tokens are in sequences that stay whole on one of {mesh.cp_size} ranks, "
            f"{num_cut:,} in sequences that are cut; {saved:.0%} less time for attention is expected"
        )
    logger.info("cp_partition_mode %s: %s; packs like it are not reported again", mesh.cp_partition_mode, what)


def _packed_stream(batch: Batch, mesh: Mesh) -> PackedStream | None:
    """The description of a pack, cut as the mesh's `cp_partition_mode` says: the same on every pipeline stage."""
    if batch.cu_seqlens is None:
        return None
    ends = tuple(batch.cu_seqlens.tolist())
    partition = plan_partition(ends, num_samples=len(batch.lengths), cp_size=mesh.cp_size, mode=mesh.cp_partition_mode)
    if mesh.cp_size > 1 and mesh.cp_partition_mode != "zigzag":
        _report(partition, ends, mesh)
    parts = None if partition is None else StreamParts.of(partition, mesh.cp_rank)
    return PackedStream(batch.cu_seqlens, ends, batch.max_seqlen, parts)


def plan_inputs(batch: Batch, mesh: Mesh, geometry: Geometry) -> ModelInputs:
    """Cut one micro-batch for this rank, on the host.

    Args:
        batch: the full stream, on the host.
        geometry: of the model's towers. Their work is planned on the first pipeline stage alone.

    Raises:
        ValueError: a sequence length is no multiple of 2*CP, or sequence parallelism cannot spread the tokens evenly.
    """

    def local(values: Tensor) -> Tensor:
        cut = split_cp_inputs(values, cu_seqlens, -1, cp_size=mesh.cp_size, cp_rank=mesh.cp_rank)
        assert cut is not None
        return cut

    packed = _packed_stream(batch, mesh)
    cu_seqlens = None if packed is None else packed.sequences
    rows, num_tokens = batch.input_ids_BS.shape
    stream_positions_BT = torch.arange(rows * num_tokens).view(rows, num_tokens)
    labels_BS, weights_BS = local_labels(batch, cu_seqlens, cp_size=mesh.cp_size, cp_rank=mesh.cp_rank)
    label_slots = _slots((labels_BS != IGNORED_LABEL) & (weights_BS > 0))

    feature_BT = torch.full((rows * num_tokens,), -1)
    visual_positions = torch.empty(0, dtype=torch.int64) if batch.visual is None else batch.visual.positions_V
    feature_BT[visual_positions] = torch.arange(visual_positions.numel())
    local_feature_BS = local(feature_BT.view(rows, num_tokens))
    visual_slots = _slots(local_feature_BS >= 0)
    own_visual_slots, visual_shares = _visual_share(visual_slots, local_feature_BS.numel(), mesh)

    work = {
        name: plan_tower_work(getattr(batch, name), of_tower, num_ranks=mesh.cp_size, rank=mesh.cp_rank)
        for name, of_tower in geometry.items()
        if mesh.is_first_stage
    }
    return ModelInputs(
        input_ids_BT=batch.input_ids_BS,
        cu_seqlens=cu_seqlens,
        packed=packed,
        position_ids_3BS=local(batch.position_ids_3BS),
        padding_mask_BS=_sequence_share(local(batch.padding_mask_BS), mesh),
        tower_work=work,
        local_features_W=_at(local_feature_BS, visual_slots),
        local_visual_slots_W=own_visual_slots,
        visual_shares=visual_shares,
        label_slots_N=label_slots,
        targets_N=_at(labels_BS, label_slots),
        weights_N=_at(weights_BS, label_slots),
        label_positions_N=_at(local(stream_positions_BT), label_slots),
    )
