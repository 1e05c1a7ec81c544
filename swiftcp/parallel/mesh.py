"""The mesh of ranks: the only module that touches megatron-core's `parallel_state`; others are handed groups.

Axes, fastest first: tensor parallel (tp), context parallel (cp), data parallel (dp), pipeline parallel (pp).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from swiftcp.errors import ConfigError
from swiftcp.parallel.partition import PartitionMode
from swiftcp.parallel.place import TensorPlace
from swiftcp.parallel.rendezvous import Place, meet


@dataclass(frozen=True)
class Mesh:
    """This rank's place on each axis, and the groups it communicates in."""

    device: torch.device
    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    sequence_parallel: bool
    """Tensor-parallel ranks share the tokens between their matrices; never with one such rank."""
    pp_size: int
    pp_rank: int
    num_chunks: int
    """Model chunks of this rank's pipeline stage (virtual pipeline); 1 without."""
    cp_size: int
    cp_rank: int
    cp_partition_mode: PartitionMode
    """Which sequences of a pack the ranks of a context-parallel group cut among them."""
    dp_size: int
    dp_rank: int
    ep_size: int
    """Ranks that the experts of a layer are spread over; they lie on the axes tp, cp and dp of one pipeline stage."""
    ep_rank: int
    expert_tp_size: int
    """Ranks that share each expert's matrices."""
    expert_tp_rank: int
    tp_group: dist.ProcessGroup
    """Ranks that share each layer's matrices, and read the same micro-batches."""
    pp_group: dist.ProcessGroup
    """The stages of one replica, first to last."""
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    """Ranks with the same part of other packs."""
    dp_cp_group: dist.ProcessGroup
    """Every rank that contributes to one gradient."""
    ep_group: dist.ProcessGroup
    """Ranks that together hold all experts of each of their layers."""
    expert_tp_group: dist.ProcessGroup
    """Ranks that share each expert's matrices."""

    def describe(self) -> str:
        sizes = f"tp {self.tp_size} x pp {self.pp_size} x cp {self.cp_size} x dp {self.dp_size}"
        experts = f", experts over ep {self.ep_size} x etp {self.expert_tp_size}" if self.ep_size * self.expert_tp_size > 1 else ""
        return f"world {self.world_size} = {sizes}{experts}"

    @property
    def place(self) -> TensorPlace:
        return TensorPlace(self.tp_rank, self.tp_size, self.expert_tp_rank, self.expert_tp_size)

    @property
    def dropout_place(self) -> int:
        """A number for each set of tensor-parallel ranks: what is dropped at random must be the same on all of them, and on no others."""
        return (self.pp_rank * self.dp_size + self.dp_rank) * self.cp_size + self.cp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def context_parallel_size() -> int:
    """CP of this process; 1 before a mesh exists."""
    return parallel_state.get_context_parallel_world_size() if parallel_state.is_initialized() else 1


def context_parallel_rank() -> int:
    """This process's rank in its context-parallel group; 0 before a mesh exists."""
    return parallel_state.get_context_parallel_rank() if parallel_state.is_initialized() else 0


def layout_sizes() -> tuple[int, int, int, int]:
    """(ranks, tp, cp, pp) of this process's mesh; what is a rank's own means the same where they are equal."""
    if not parallel_state.is_initialized():
        return dist.get_world_size(), 1, 1, 1
    tp, pp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size()
    return dist.get_world_size(), tp, context_parallel_size(), pp


def schedule_groups() -> ProcessGroupCollection:
    """The groups that megatron-core's schedules and the reduction of gradients use."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"])


def select_device(device: str) -> torch.device:
    """`cpu`, or this rank's CUDA device.

    Raises:
        ConfigError: CUDA is asked for where there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device: set device to cpu or auto")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)  # srun --gpus-per-task shows each rank its own alone


def start_process_group(device: torch.device, terms: Mapping[str, str] | None = None, timeout_minutes: float = 30) -> None:
    """Join the ranks that the launcher's variables describe; a lone process becomes a world of one.

    Args:
        terms: what must be the same on every node, by name.
    Raises:
        ConfigError: nodes differ in that, or in how many ranks there are.
        TrainingError: a node did not come.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    place = Place.from_environment()
    store = meet(place, terms or {})
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def build_mesh(
    device: torch.device,
    *,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    cp_partition_mode: PartitionMode = "zigzag",
    hierarchical_context_parallel_sizes: list[int] | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
) -> Mesh:
    """Lay the ranks out; the process group must exist. A mesh built before is taken down.

    Raises:
        ConfigError: the number of ranks is no multiple of the product of the sizes, those of the dense layers or those of the experts.
    """
    world_size = dist.get_world_size()
    holders = pipeline_model_parallel_size * expert_model_parallel_size * expert_tensor_parallel_size
    if world_size % holders:
        raise ConfigError(
            f"{world_size} ranks do not divide into pp {pipeline_model_parallel_size} x ep {expert_model_parallel_size} x "
            f"etp {expert_tensor_parallel_size} = {holders}, which hold all experts: start a multiple of {holders} ranks"
        )
    replica = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if world_size % replica:
        raise ConfigError(
            f"{world_size} ranks do not divide into replicas of tp {tensor_model_parallel_size} x pp {pipeline_model_parallel_size} x "
            f"cp {context_parallel_size} = {replica}: start a multiple of {replica} ranks"
        )
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    return Mesh(
        device=device,
        rank=dist.get_rank(),
        world_size=world_size,
        tp_size=tensor_model_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        sequence_parallel=sequence_parallel and tensor_model_parallel_size > 1,
        pp_size=pipeline_model_parallel_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        num_chunks=virtual_pipeline_model_parallel_size or 1,
        cp_size=context_parallel_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_partition_mode=cp_partition_mode,
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_size=expert_model_parallel_size,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tp_size=expert_tensor_parallel_size,
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )


def stop() -> None:
    """Take the mesh and the process group down."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
