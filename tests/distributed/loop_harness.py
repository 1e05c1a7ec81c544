"""Whole runs of `swiftcp sft` and `swiftcp logprobs` on the ranks of a pool, configured as the command line configures them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


def resolved_config(config_class: Any, values: dict[str, Any], *, world_size: int) -> Any:
    from swiftcp.config import Machine, resolve, validate

    fixed = {"device": "cpu", "dataloader_num_workers": 0, "nproc_per_node": world_size}
    return validate(resolve(config_class, values={**fixed, **values}, environment={}), Machine(world_size, world_size, 0))


@contextmanager
def sigterm_behind_step(step: int | None, rank: int) -> Iterator[None]:
    """Inside, `rank` gets SIGTERM when its training loop has done so many steps of this session."""
    from swiftcp.trainers import sft

    original, done = sft.train_step, 0

    def counted(*arguments: Any) -> Any:
        nonlocal done
        result = original(*arguments)
        done += 1
        if done == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    sft.train_step = counted
    try:
        yield
    finally:
        sft.train_step = original


def run_sft(values: dict[str, Any], mode: str = "sft", sigterm_step: int | None = None, sigterm_rank: int = 0) -> str:
    """On each rank: train; returns "done", or the name and text of the error that training ended with."""
    from swiftcp.config import TrainConfig
    from swiftcp.errors import SwiftcpError
    from swiftcp.trainers import sft

    # Processes of a pool may have no children by default; data workers are some.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        with sigterm_behind_step(sigterm_step, sigterm_rank):
            sft.train(resolved_config(TrainConfig, values, world_size=dist.get_world_size()), mode)  # type: ignore[arg-type]
    except SwiftcpError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def trained_packs(values: dict[str, Any]) -> list[tuple[Any, ...]]:
    """On each rank: (rows, places where they begin, tokens) of every pack of a run, in order; nothing is trained."""
    from swiftcp.config import TrainConfig
    from swiftcp.trainers import sft
    from swiftcp.trainers.setup import load_source, start_ranks

    config = resolved_config(TrainConfig, values, world_size=dist.get_world_size()).config
    mesh = start_ranks(config)
    data = sft.load_data(config, "sft", load_source(Path(config.model)), mesh)
    stream = sft.open_stream(config, data, mesh, start_step=0)
    return [(batch.rows, batch.cu_seqlens.tolist(), batch.input_ids_BS.tolist()) for batch in stream]


def run_logprobs(values: dict[str, Any]) -> None:
    """On each rank: write log-probabilities."""
    from swiftcp.config import LogprobsConfig
    from swiftcp.trainers import logprobs

    logprobs.run(resolved_config(LogprobsConfig, values, world_size=dist.get_world_size()))


def run_export(values: dict[str, Any]) -> str:
    """On each rank: export a checkpoint; returns "done", or the name and text of the error."""
    from swiftcp.config import Machine, resolve
    from swiftcp.config.export import ExportConfig, validate_export
    from swiftcp.errors import SwiftcpError
    from swiftcp.trainers import export

    world_size = dist.get_world_size()
    resolved = resolve(ExportConfig, values={**values, "device": "cpu"}, environment={})
    try:
        export.run(validate_export(resolved, Machine(world_size, world_size, 0)))
    except SwiftcpError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def logged(output_dir: Path) -> list[dict[str, Any]]:
    """The objects of a run's logging.jsonl."""
    return [json.loads(line) for line in (output_dir / "logging.jsonl").read_text().splitlines()]
