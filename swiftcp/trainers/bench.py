"""`swiftcp bench`: the real training step on a real shape with random weights and random packs, measured."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from swiftcp.config.bench import BenchConfig
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.data.batch import Batch
from swiftcp.models.build import build_chunks, freeze
from swiftcp.models.registry import family_of
from swiftcp.models.shapes import find_shape
from swiftcp.models.towers import VisionGeometry
from swiftcp.parallel import cpu_shim
from swiftcp.parallel.layer_specs import Backend, select_backend
from swiftcp.parallel.mesh import Mesh, stop
from swiftcp.trainers.ahead import PlannedBatch, plan_ahead
from swiftcp.trainers.logs import memory_gib, utilisation
from swiftcp.trainers.optimizer import build_optimizer, build_scheduler, wrap_model
from swiftcp.trainers.part_timer import PartTimer
from swiftcp.trainers.setup import decoder_settings, recompute_fields, recompute_tower, start_ranks
from swiftcp.trainers.step import Runner, Totals, train_step
from swiftcp.trainers.synthetic import random_pack

logger = logging.getLogger(__name__)

NUM_PACKS = 2
"""Different packs that take turns."""
INIT_STD = 0.02


@dataclass(frozen=True)
class Measurement:
    """What is told of a run of `bench`."""

    shape: str
    layout: str
    backend: Backend
    device: str
    num_tokens: int
    num_sequences: int
    num_images: int
    image_tokens: int
    recompute: str
    steps: int
    seconds_per_step: float
    tokens_per_second_per_gpu: float
    memory_gib: float
    """Peak on the rank that needed most."""
    first_loss: float
    last_loss: float
    grad_norm: float
    seconds_by_part: dict[str, float]
    """Of one step, on the first rank."""
    tflops_per_gpu: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    runner: Runner
    optimizer: Any
    scheduler: Any
    batches: Iterator[Batch | PlannedBatch]
    timer: PartTimer
    backend: Backend

    def steps(self, num_steps: int, num_packs: int) -> list[tuple[Totals, float]]:
        results = []
        for _ in range(num_steps):
            results.append(train_step(self.runner, self.optimizer, self.scheduler, self.batches, num_packs))
            self.timer.mark("optimizer")
        return results


def run(resolved: ResolvedConfig[BenchConfig]) -> None:
    """Run in each rank process; the first prints a table and one line of JSON.

    Raises:
        ConfigError: the shape is not known, or the device or the backend cannot be used.
    """
    config = resolved.config
    mesh = start_ranks(config)
    with cpu_shim.cpu_mode():
        bench = build(config, mesh)
        measurement = measure(bench, config, mesh)
        if mesh.rank == 0:
            print(table(measurement))
            print(json.dumps(asdict(measurement)), flush=True)
        if config.profile:
            profile(bench, config.num_packs, prints=mesh.rank == 0)
    stop()


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Normal matrices, gains of one, biases of zero, made on the device; the same on every rank of a stage, for all seed alike."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            tied = getattr(parameter, "shared_embedding", False)  # with a copy on another stage, which must equal it
            parameter.normal_(0.0, INIT_STD, generator=torch.Generator(parameter.device).manual_seed(0) if tied else None)
        else:
            parameter.fill_(float(name.endswith("weight")))


def build(config: BenchConfig, mesh: Mesh) -> Bench:
    """Model, optimizer and packs, as for training."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(find_shape(config.shape))
    family = family_of(hf_config.model_type)
    geometry = family.tower_geometry(hf_config)
    backend = select_backend(config.attention_backend)
    settings = decoder_settings(config, family, hf_config, mesh, backend=backend, recompute=recompute_fields(config))
    chunks = build_chunks(family, hf_config, settings, mesh, backend=backend)
    if config.vit_gradient_checkpointing:
        recompute_tower(chunks)
    for chunk in chunks:
        fill_randomly(chunk)
    freeze(chunks, family, llm=config.freeze_llm, vit=config.freeze_vit, aligner=config.freeze_aligner)
    timer = PartTimer(mesh.device)
    for chunk in chunks:
        timer.attach(chunk)
    wrapped = wrap_model(chunks, mesh, use_distributed_optimizer=bool(config.use_distributed_optimizer))
    optimizer = build_optimizer(wrapped, config, family)
    seeds = [config.seed + 1000 * mesh.dp_rank + number for number in range(NUM_PACKS)]
    sizes = config.num_tokens, config.num_sequences, config.num_images, config.image_tokens
    packs = [
        random_pack(*sizes, family=family, hf_config=hf_config, geometry=cast(VisionGeometry, geometry["visual"]), seed=seed)
        for seed in seeds
    ]
    return Bench(
        runner=Runner(wrapped, mesh, geometry, chunks[0].vocab_size),
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config, config.num_steps + config.num_warmup_steps + 1),
        batches=plan_ahead(itertools.cycle(packs), mesh, geometry),
        timer=timer,
        backend=backend,
    )


def _recompute(config: BenchConfig) -> str:
    return {"selective": " ".join(config.recompute_modules or []), "none": "none"}.get(config.recompute_granularity, "full")


def measure(bench: Bench, config: BenchConfig, mesh: Mesh) -> Measurement:
    """Warm up, then time steps; the same numbers on every rank, but for seconds by part."""
    warmup = bench.steps(config.num_warmup_steps, config.num_packs)
    bench.timer.start()
    results = bench.steps(config.num_steps, config.num_packs)
    parts = {part: seconds / config.num_steps for part, seconds in bench.timer.seconds().items()}
    of_this_rank = torch.tensor([sum(parts.values()), memory_gib(mesh.device)], device=mesh.device, dtype=torch.float64)
    dist.all_reduce(of_this_rank, op=dist.ReduceOp.MAX)
    seconds, memory = of_this_rank.tolist()
    totals, grad_norm = results[-1]
    return Measurement(
        shape=config.shape,
        layout=mesh.describe(),
        backend=bench.backend,
        device=torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
        num_tokens=config.num_tokens,
        num_sequences=config.num_sequences,
        num_images=config.num_images,
        image_tokens=config.image_tokens,
        recompute=_recompute(config),
        steps=config.num_steps,
        seconds_per_step=seconds,
        tokens_per_second_per_gpu=totals.tokens / seconds / mesh.world_size,
        memory_gib=memory,
        first_loss=[*warmup, *results][0][0].loss,
        last_loss=totals.loss,
        grad_norm=grad_norm,
        seconds_by_part=parts,
        **utilisation(totals, seconds, mesh),
    )


def table(measured: Measurement) -> str:
    """For people."""
    pack = f"{measured.num_sequences} x {measured.num_tokens // measured.num_sequences:,} tokens"
    images = f", {measured.num_images} images of {measured.image_tokens:,} tokens" if measured.num_images else ""
    rows = [
        ("model", f"{measured.shape}, recompute {measured.recompute}, attention {measured.backend}"),
        ("layout", f"{measured.layout}, {measured.device}"),
        ("pack", pack + images),
        ("seconds a step", f"{measured.seconds_per_step:.3f} (mean of {measured.steps})"),
        ("tokens/s per GPU", f"{measured.tokens_per_second_per_gpu:,.0f}"),
    ]
    if measured.mfu is not None:
        note = "of the model; causal attention counted as causal, the tower counted, recomputation not"
        rows.append(("TFLOP/s per GPU", f"{measured.tflops_per_gpu:,.0f}, MFU {measured.mfu:.1%} ({note})"))
    rows.append(("peak GiB", f"{measured.memory_gib:.1f}"))
    rows.append(("loss", f"{measured.first_loss:.5f} first, {measured.last_loss:.5f} last; gradient norm {measured.grad_norm:.4f}"))
    rows += [(f"  {part}", f"{seconds:.4f} s") for part, seconds in measured.seconds_by_part.items()]
    return "\n".join(f"{name:<18} {value}" for name, value in rows)


def profile(bench: Bench, num_packs: int, *, prints: bool) -> None:
    """One more step on every rank; the first lists its kernels by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch_profile(activities=activities) as profiled:
        bench.steps(1, num_packs)
    if prints:
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))
