"""Host memory of each rank while a model folder is read and written: at most 1.3 times its own weights and one shard.

    python benchmarks/load_memory.py [--shape qwen3_vl_8b] [--num_layers 12] [--tp 2] [--ep 2] [--shard_mb 5000] [--folder DIR]

Writes a folder of random bfloat16 weights of the shape, starts the ranks, which build the model on the CPU, read the folder and export
it, and exits 1 where a rank needs more. Counted is anonymous memory (RssAnon of /proc/self/status, sampled every 5 ms) above what a
rank has when everything is imported; pages of mapped files (RssFile) are the page cache's, which the kernel takes back at need, and are
shown beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

BOUND = 1.3
MB = 10**6


@dataclass
class Peak:
    """Most memory of a phase, in bytes."""

    anonymous: int = 0
    mapped: int = 0


def resident() -> tuple[int, int]:
    """(anonymous, mapped from files) bytes of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))  # type: ignore[return-value]


@contextmanager
def sampled(peak: Peak) -> Iterator[None]:
    """Inside, keep the most memory that this process has."""
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            anonymous, mapped = resident()
            peak.anonymous, peak.mapped = max(peak.anonymous, anonymous), max(peak.mapped, mapped)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def write_folder(folder: Path, config_file: Path, num_layers: int | None, shard_bytes: int) -> None:
    """config.json and random bfloat16 weights, a shard at a time in memory."""
    import torch
    from safetensors.torch import save_file

    from swiftcp.checkpoint.hf_reader import model_tensors

    config = json.loads(config_file.read_text())
    if num_layers:
        config.get("thinker_config", config)["text_config"]["num_hidden_layers"] = num_layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    chunk, table, _ = build(folder, device="meta")
    model = model_tensors(chunk)
    sources = {
        name: shape
        for target, rule in table.pair(list(model)).items()
        for name, shape in zip(rule.sources, rule.source_shapes(model[target].shape), strict=True)
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in sources.items():
        size = 2 * torch.Size(shape).numel()
        if filled + size > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        save_file({name: torch.empty(sources[name], dtype=torch.bfloat16).normal_(0, 0.02) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def build(folder: Path, device: str, tp: int = 1, ep: int = 1) -> tuple[Any, Any, Any]:
    """This rank's model, its name table, and this rank's place among those that share each matrix."""
    import torch
    from transformers import AutoConfig

    from swiftcp.models.build import build_model, transformer_config
    from swiftcp.models.registry import family_of
    from swiftcp.parallel import cpu_shim
    from swiftcp.parallel.mesh import build_mesh, start_process_group

    hf_config = AutoConfig.from_pretrained(folder)
    family = family_of(hf_config.model_type)
    cpu_shim.install()
    start_process_group(torch.device("cpu"))
    with cpu_shim.cpu_mode():
        sizes = dict(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, sequence_parallel=tp > 1)
        mesh = build_mesh(torch.device("cpu"), **sizes)
        settings = transformer_config(family, hf_config, mesh, dtype=torch.bfloat16, backend="torch")
        model = build_model(family, hf_config, settings, mesh, backend="torch", device=torch.device(device))
    return model, family.name_table(hf_config), mesh.place


def measure(rank: int, folder: Path, tp: int, ep: int, port: int, shard_bytes: int, results: Any) -> None:
    """On each rank: (own weights, {phase: peak above the start}) in bytes."""
    if (world_size := lcm(tp, ep)) > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    from swiftcp.checkpoint.hf_reader import load_hf_folder, model_tensors
    from swiftcp.checkpoint.hf_writer import export_hf_folder
    from swiftcp.parallel.mesh import stop

    start, _ = resident()
    peaks = {phase: Peak() for phase in ("build", "load", "export")}
    seconds = {}
    with sampled(peaks["build"]):
        model, table, place = build(folder, "cpu", tp, ep)
    own = sum(tensor.nbytes for tensor in model_tensors(model).values())
    began = time.perf_counter()
    with sampled(peaks["load"]):
        load_hf_folder(model, folder, table, place)
    seconds["load"] = time.perf_counter() - began
    began = time.perf_counter()
    with sampled(peaks["export"]):
        export_hf_folder(model, folder, folder / "exported", table, place, max_shard_bytes=shard_bytes)
    seconds["export"] = time.perf_counter() - began
    stop()
    results.put((rank, own, {phase: (peak.anonymous - start, peak.mapped) for phase, peak in peaks.items()}, seconds))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(folder: Path, config_file: Path, num_layers: int | None, tp: int, ep: int, shard_bytes: int) -> bool:
    """Print the table; whether all ranks stay within the bound."""
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=write_folder, args=(folder, config_file, num_layers, shard_bytes))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=measure, args=(rank, folder, tp, ep, port, shard_bytes, results)) for rank in range(lcm(tp, ep))]
    for process in ranks:
        process.start()
    found = sorted(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    print("| rank | phase | own weights MB | peak anonymous MB | above own weights MB | bound MB | mapped files MB | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    holds = True
    for rank, own, peaks, seconds in found:
        bound = BOUND * own + shard_bytes
        for phase, (anonymous, mapped) in peaks.items():
            holds &= anonymous <= bound
            numbers = [own, anonymous, anonymous - own, bound, mapped]
            took = f"{seconds[phase]:.0f}" if phase in seconds else ""
            print(f"| {rank} | {phase} | " + " | ".join(f"{number / MB:,.0f}" for number in numbers) + f" | {took} |")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_vl_8b", help="a public model by name, or the config.json of any")
    parser.add_argument("--num_layers", type=int, help="fewer decoder layers, where disk or memory are short")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="ranks that the experts of a layer are spread over")
    parser.add_argument("--shard_mb", type=int, default=5000, help="largest shard, MB")
    parser.add_argument("--folder", type=Path, help="where to write the folder; default: a temporary one")
    arguments = parser.parse_args()
    from swiftcp.models.shapes import find_shape

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        shape = find_shape(arguments.shape)
        holds = run(Path(folder) / "model", shape, arguments.num_layers, arguments.tp, arguments.ep, arguments.shard_mb * MB)
    print("within the bound" if holds else f"over the bound of {BOUND} x own weights + one shard")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
