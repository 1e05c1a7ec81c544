"""megatron-core's pipeline schedules, as this project calls them: for any number of stages and of model chunks a stage.

Micro-batches have any length, so stages tell each other a tensor's shape before they send it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from swiftcp.parallel.mesh import Mesh, schedule_groups


class InterleavedCommunicator(P2PCommunicator):
    """Sends between stages that hold several chunks each, where the last stage sends to the first.

    With two stages the one before and the one behind are the same rank, which takes messages in the order in which they are sent.
    megatron-core (0.19) exchanges shapes in an order that then swaps those of activations and gradients. It also waits until its own
    shapes are taken, which gloo tells no earlier than they are asked for: the peer may first wait for the tensor that comes next.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> None:
        super().__init__(pp_group, config)
        self._under_way: list[Any] = []
        """Shapes that are sent; kept until the schedule is over."""

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes [S, B, H] of what comes from the stage before, and from the one behind; zeros where nothing comes."""
        device = torch.cuda.current_device()

        def sends(tensor: Tensor | None, rank: int | None) -> list[P2POp]:
            if tensor is None:
                return []
            return [P2POp(isend, torch.tensor(tensor.shape, device=device, dtype=torch.int64), rank, self.pp_group)]

        from_previous, from_next = (torch.zeros(3, device=device, dtype=torch.int64) for _ in range(2))
        operations = [
            *sends(tensor_send_next, self.next_rank),
            *([P2POp(irecv, from_previous, self.prev_rank, self.pp_group)] if recv_prev else []),
            *sends(tensor_send_prev, self.prev_rank),
            *([P2POp(irecv, from_next, self.next_rank, self.pp_group)] if recv_next else []),
        ]
        requests = batch_isend_irecv(operations) if operations else []
        if len(requests) == len(operations):  # NCCL has one request for all, and sends what is small without being asked
            self._under_way += requests
            requests = [request for request, operation in zip(requests, operations, strict=True) if operation.op is irecv]
        for request in requests:
            request.wait()
        return from_previous.tolist(), from_next.tolist()


def run_schedule(
    forward_step: Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[[Tensor], Any]]],
    micro_batches: Iterator[Any],
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    num_micro_batches: int,
    *,
    forward_only: bool,
) -> list[Any]:
    """Forward (and backward) of the next micro-batches through all stages. Every rank calls it with the same number.

    Args:
        forward_step: (micro-batches, chunk) -> (the chunk's output, what makes (loss, number of labels, report) of the last one's).
        micro_batches: every chunk of this rank sees each of them once.
        chunks: of this rank's stage; with several, `num_micro_batches` is a multiple of the number of stages.

    Returns:
        The reports, on the last stage; nothing on the others.
    """
    coming = itertools.tee(itertools.islice(micro_batches, num_micro_batches), len(chunks))
    more: dict[str, Any] = {}
    if len(chunks) > 1:
        communicator = InterleavedCommunicator(mesh.pp_group, chunks[0].config)  # type: ignore[arg-type]
        more = {"p2p_communicator": communicator, "pg_collection": schedule_groups()}
    schedule = get_forward_backward_func(pp_size=mesh.pp_size, vp_size=len(chunks) if len(chunks) > 1 else None)
    return schedule(
        forward_step_func=forward_step,
        data_iterator=list(coming),
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=0,  # not read: shapes are told
        micro_batch_size=1,
        forward_only=forward_only,
        **more,
    )


def sum_over_stages(values: Tensor, mesh: Mesh) -> Tensor:
    """The sum over a replica's stages, in place, on all of them."""
    if mesh.pp_size > 1:
        dist.all_reduce(values, group=mesh.pp_group)
    return values
