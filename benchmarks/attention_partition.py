"""Core attention alone under context parallelism, forward and backward: sequences that stay whole against sequences that are all cut.

    torchrun --nproc_per_node 2 benchmarks/attention_partition.py                   # two GPUs, 1 x 16,384 + 4 x 4,096 tokens
    torchrun --nproc_per_node 2 benchmarks/attention_partition.py --device cpu --lengths 256 64 64 64 64 --heads 4 --groups 2

Both partitions run in turn in one process, the slowest rank counts, and the ratio is printed: what a step's attention gains.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from swiftcp.parallel.attention import TorchCoreAttention, in_parts
from swiftcp.parallel.cpu_shim import cpu_mode
from swiftcp.parallel.layer_specs import select_backend
from swiftcp.parallel.mesh import Mesh, build_mesh, select_device, start_process_group, stop
from swiftcp.parallel.packed import PackedStream, StreamParts
from swiftcp.parallel.partition import COSTS, PartitionMode, plan_partition, zigzag_partition

HEAD_SIZE = 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 4096, 4096, 4096, 4096])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--cp_comm_type", default="p2p")
    parser.add_argument("--num_steps", type=int, default=20)
    return parser.parse_args()


def build_attention(args: argparse.Namespace, mesh: Mesh) -> nn.Module:
    """One layer's, with Transformer Engine where it works."""
    backend = select_backend("auto")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.heads * HEAD_SIZE,
        num_attention_heads=args.heads,
        num_query_groups=args.groups,
        kv_channels=HEAD_SIZE,
        context_parallel_size=mesh.cp_size,
        cp_comm_type=args.cp_comm_type if backend == "te" else None,
        attention_dropout=0.0,
        use_cpu_initialization=mesh.device.type == "cpu",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    if backend == "torch":
        return TorchCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention = in_parts(TEDotProductAttention)
    return attention(config, 1, AttnMaskType.causal, "self", cp_comm_type=args.cp_comm_type, pg_collection=groups)


def stream_of(lengths: list[int], mesh: Mesh, mode: PartitionMode) -> PackedStream:
    ends = (0, *itertools.accumulate(lengths))
    partition = plan_partition(ends, num_samples=len(lengths), cp_size=mesh.cp_size, mode=mode)
    parts = None if partition is None else StreamParts.of(partition, mesh.cp_rank)
    stream = PackedStream(torch.tensor(ends, dtype=torch.int32), ends, max(lengths), parts)
    return stream.map(lambda values: values.to(mesh.device))


def wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def milliseconds(attention: nn.Module, heads: list[Tensor], stream: PackedStream, mesh: Mesh, num_steps: int) -> float:
    """Mean of a forward and backward pass."""
    started = 0.0
    for step in range(3 + num_steps):
        if step == 3:
            wait(mesh)
            started = time.perf_counter()
        output = attention(*heads, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=stream)
        torch.autograd.grad(output, heads, torch.ones_like(output))
    wait(mesh)
    return 1e3 * (time.perf_counter() - started) / num_steps


def main() -> None:
    args = arguments()
    device = select_device(args.device)
    start_process_group(device)
    mesh = build_mesh(device, context_parallel_size=dist.get_world_size())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_local = sum(args.lengths) // mesh.cp_size
    with cpu_mode():
        attention = build_attention(args, mesh)
        heads = [
            torch.randn(num_local, number, HEAD_SIZE, device=device, dtype=dtype, requires_grad=True)
            for number in (args.heads, args.groups, args.groups)
        ]
        streams = {mode: stream_of(args.lengths, mesh, mode) for mode in ("zigzag", "whole")}
        rounds = [
            {mode: milliseconds(attention, heads, stream, mesh, args.num_steps) for mode, stream in streams.items()} for _ in range(3)
        ]
    if mesh.rank == 0:
        took = {mode: min(of_round[mode] for of_round in rounds) for mode in streams}
        for mode, duration in took.items():
            print(f"{mode}: {duration:.3f} ms")
        partition = plan_partition(streams["whole"].host_ends, num_samples=len(args.lengths), cp_size=mesh.cp_size, mode="whole")
        ends = streams["zigzag"].host_ends
        expected = 1.0 if partition is None else COSTS.seconds(zigzag_partition(ends, mesh.cp_size)) / COSTS.seconds(partition)
        ratio = took["zigzag"] / took["whole"]
        print(f"whole is {ratio:.2f} times as fast as zigzag; by the model of costs {expected:.2f} times")
    stop()


if __name__ == "__main__":
    main()
