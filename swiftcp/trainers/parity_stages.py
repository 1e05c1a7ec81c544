"""The stages of `swiftcp parity`, as `parity_worker` runs them in rank processes.

The task names the stage, the configuration and the file that the first rank writes. All stages read the same rows; the stages of
this project go through the pieces of training itself: data, inputs, model, DDP, schedule, reduction of gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from swiftcp.checkpoint.durable import write_text
from swiftcp.checkpoint.name_table import NameTable
from swiftcp.checkpoint.together import whole_tensors
from swiftcp.config.concerns import ParityConfig
from swiftcp.data.batch import Batch
from swiftcp.data.dataset import EncodedDataset
from swiftcp.data.loader import batches_in_order
from swiftcp.models.mm_gpt_model import named_parameters
from swiftcp.parallel import cpu_shim
from swiftcp.parallel import mesh as ranks_mesh
from swiftcp.parallel.mesh import Mesh
from swiftcp.trainers.datasets import batch_layout, make_encoder, open_dataset
from swiftcp.trainers.gradient_sketch import sketch
from swiftcp.trainers.logprobs import logprob_rows
from swiftcp.trainers.optimizer import wrap_model
from swiftcp.trainers.oracle import load_oracle, oracle_logprobs, with_adapter
from swiftcp.trainers.setup import Source, load_model, load_source, start_ranks
from swiftcp.trainers.step import Runner, run_micro_batches


def _oracle_stage(config: ParityConfig, dataset: EncodedDataset, source: Source, mesh: Mesh) -> dict[str, Any]:
    """`transformers`, one row at a time."""
    model = load_oracle(source.folder, source.family, dtype=getattr(torch, str(config.torch_dtype)), device=mesh.device)
    model = with_adapter(model, config.adapters)
    with torch.no_grad():
        return {"logprobs": [oracle_logprobs(model, dataset[place]).tolist() for place in range(len(dataset))]}


def _gradients(runner: Runner, batches: Sequence[Batch], table: NameTable) -> tuple[Any, dict[str, Any]]:
    """The totals of one global batch, and a sketch of each reduced gradient, whole, of all pipeline stages; by the checkpoint's names."""
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    totals = run_micro_batches(runner, iter(batches), len(batches))
    named = [(name, cast(Any, parameter)) for chunk in runner.chunks for name, parameter in named_parameters(chunk)]
    gradients = {name: parameter.main_grad for name, parameter in named if parameter.requires_grad}
    own = {name: asdict(sketch(name, whole)) for name, whole in whole_tensors(gradients, table, runner.mesh)}
    of_stages: list[Any] = [None] * runner.mesh.pp_size
    dist.all_gather_object(of_stages, own, group=runner.mesh.pp_group)
    return totals, {name: one for stage in of_stages for name, one in stage.items()}


def _layout_stage(config: ParityConfig, dataset: EncodedDataset, source: Source, mesh: Mesh) -> dict[str, Any]:
    """All rows as one global batch of training under the configuration's layout and packing."""
    layout = batch_layout(config, mesh)
    chunks = load_model(config, source, mesh)
    rows = logprob_rows([chunk.eval() for chunk in chunks], dataset, layout, source, mesh)
    logprobs = [row["logprobs"][1:] for row in rows]
    wrapped = wrap_model([chunk.train() for chunk in chunks], mesh, use_distributed_optimizer=False)
    runner = Runner(wrapped, mesh, source.geometry, source.family.vocab_size(source.hf_config))
    totals, sketches = _gradients(runner, list(batches_in_order(dataset, layout)), source.family.name_table(source.hf_config))
    packed = f"packs of {config.packing_length}" if config.packing else "padded rows"
    return {
        "description": f"{len(dataset)} rows, {totals.tokens} tokens; {mesh.describe()}; {packed}; {config.torch_dtype}",
        "loss": totals.loss,
        "num_labels": totals.labelled_tokens,
        "grad_norm": math.hypot(*(one["norm"] for one in sketches.values())),
        "gradients": sketches,
        "logprobs": logprobs,
    }


def run_stage(task: dict[str, Any]) -> None:
    """Run one stage in this rank; the first rank writes the result."""
    config = ParityConfig(**task["config"])
    mesh = start_ranks(config)
    with cpu_shim.cpu_mode():
        source = load_source(Path(config.model))
        dataset = open_dataset(config.dataset, make_encoder(config, config.mode, source, mesh), config, mesh)
        stage = _oracle_stage if task["stage"] == "transformers" else _layout_stage
        result = stage(config, dataset, source, mesh)
    if mesh.rank == 0:
        write_text(Path(task["output"]), json.dumps(result))
    ranks_mesh.stop()
