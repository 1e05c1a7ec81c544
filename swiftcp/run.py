"""Runs a command that has a configuration: resolve and check it, then start the ranks of this machine, or be one.

All checks happen before ranks start, so that an error is told once. What runs in a rank is imported there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from swiftcp.config import Concern, LogprobsConfig, Machine, ParityConfig, ResolvedConfig, TrainConfig, resolve, validate
from swiftcp.config.bench import BenchConfig, validate_bench
from swiftcp.config.concerns import TrainingMode
from swiftcp.config.export import ExportConfig, validate_export
from swiftcp.config.facts import read_shape_facts
from swiftcp.config.slurm import JobConfig, write_script
from swiftcp.errors import ConfigError, LostContactError, PreemptedError, TrainingError, is_lost_contact
from swiftcp.launch import SWIFTCP, count_gpus, launch_local
from swiftcp.models.shapes import find_shape
from swiftcp.rank import prepare_rank, set_up_logging, stoppable_at_once
from swiftcp.topology import Topology, find_topology

Command = Literal["sft", "pt", "logprobs", "parity", "bench", "export"]

CONFIG_CLASSES: dict[Command, type[Concern]] = {
    "sft": TrainConfig,
    "pt": TrainConfig,
    "logprobs": LogprobsConfig,
    "parity": ParityConfig,
    "bench": BenchConfig,
    "export": ExportConfig,
}


def prepare(
    command: Command, arguments: Sequence[str], *, values: Mapping[str, object] | None = None, environment: Mapping[str, str]
) -> tuple[ResolvedConfig[Any], Topology]:
    """The complete, valid configuration of a command and the ranks that it is for.

    Raises:
        ConfigError: recipe, options, environment, model folder, data files or launcher variables are wrong.
    """
    resolved: ResolvedConfig[Any] = resolve(CONFIG_CLASSES[command], arguments, values=values, environment=environment)
    config = resolved.config
    num_gpus = count_gpus(environment)
    topology = find_topology(
        environment,
        nproc_per_node=config.nproc_per_node,
        num_gpus=0 if config.device == "cpu" or isinstance(config, ExportConfig) else num_gpus,  # an export takes one replica
        model_parallel_size=config.fewest_ranks,
    )
    machine = Machine(topology.world_size, topology.local_world_size, topology.gpus_of_node(num_gpus))
    if isinstance(config, BenchConfig):
        return validate_bench(resolved, machine, read_shape_facts(find_shape(config.shape))), topology
    if isinstance(config, ExportConfig):
        return validate_export(resolved, machine), topology
    return validate(resolved, machine), topology


def make_job_script(job: JobConfig, mode: TrainingMode, recipe: Path, arguments: Sequence[str]) -> str:
    """The script that sbatch takes for `swiftcp sft` or `pt`; the recipe is resolved and checked for the job's nodes first.

    Raises:
        ConfigError: the recipe is wrong, or its layout does not fit the nodes.
    """
    job.check()
    words = [str(recipe.resolve()), *arguments]
    resolved = resolve(TrainConfig, words, environment=os.environ)
    config, per_node = resolved.config, job.gpus_per_node
    if config.nproc_per_node not in (None, per_node):
        origin = resolved.origins["nproc_per_node"]
        raise ConfigError(f"nproc_per_node {config.nproc_per_node} [{origin}] is not --gpus_per_node {per_node}: leave it out")
    machine = Machine(job.nodes * per_node, per_node, 0 if config.device == "cpu" else per_node)
    full = validate(resolved, machine)
    given = [] if config.nproc_per_node else [f"--nproc_per_node={per_node}"]
    return write_script(
        job,
        recipe,
        [*SWIFTCP, mode, *words, *given],
        full.derived[0],
        folder=Path.cwd(),
        on_cpu=full.config.device == "cpu",
        preempted=PreemptedError.exit_code,
    )


def submit_job(script: str) -> int:
    """Hand a job script to sbatch, which says the job's number. Returns sbatch's exit code.

    Raises:
        ConfigError: there is no sbatch.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigError("--submit needs sbatch, which is not on PATH: run it where jobs are submitted, or write the script with --output")
    return subprocess.run([sbatch], input=script, text=True, check=False).returncode


def _run_rank(command: Command, resolved: ResolvedConfig[Any], topology: Topology) -> None:
    """What one rank does."""
    if topology.world_size > 1:
        os.environ.update(topology.variables())
    if topology.rank == 0:
        print("\n".join([topology.describe(), resolved.describe()]), flush=True)
    prepare_rank(resolved.config.device)
    with stoppable_at_once(first_rank=topology.rank == 0, goes_on=command in ("sft", "pt")):
        if command == "logprobs":
            from swiftcp.trainers import logprobs

            logprobs.run(resolved)
        elif command == "bench":
            from swiftcp.trainers import bench

            bench.run(resolved)
        elif command == "export":
            from swiftcp.trainers import export

            export.run(resolved)
        else:
            assert command in ("sft", "pt")
            from swiftcp.trainers import sft

            sft.train(resolved, command)


def _run_parity(resolved: ResolvedConfig[Any], topology: Topology) -> int:
    """Starts ranks of its own, several times over."""
    if topology.source != "this machine":
        raise ConfigError(f"parity starts its own ranks, but found those of {topology.source}: run it without a launcher")
    print(resolved.describe(), flush=True)
    from swiftcp.trainers import parity

    with stoppable_at_once(first_rank=True, goes_on=False):
        return parity.run(resolved)


def run(command: Command, arguments: Sequence[str], *, values: Mapping[str, object] | None = None) -> int:
    """Run a command to its end. Returns its exit code.

    Raises:
        SwiftcpError: whatever is wrong before ranks start, or in this process's own rank.
    """
    try:
        resolved, topology = prepare(command, arguments, values=values, environment=os.environ)
    except ConfigError as error:
        if (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0":
            raise
        return error.exit_code  # the node's first rank says it
    set_up_logging(informs=topology.rank in (0, None))
    if command == "parity":
        return _run_parity(resolved, topology)
    if topology.rank is not None:
        try:
            _run_rank(command, resolved, topology)
        except RuntimeError as error:
            if is_lost_contact(error):
                raise LostContactError(f"rank {topology.rank} lost contact with another rank: {error}") from error
            raise
        return 0
    return launch_local(
        [command, *arguments, *_as_arguments(values or {})],
        topology.local_world_size,
        node_rank=topology.node_rank,
        num_nodes=topology.num_nodes,
        master_addr=topology.master_addr,
        master_port=topology.master_port,
    )


def _as_arguments(values: Mapping[str, object]) -> list[str]:
    """Values from Python as a command line, for ranks read one."""
    texts = {name: str(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=str) for name, value in values.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def run_from_python(command: Command, config: Concern | Mapping[str, Any]) -> None:
    """`swiftcp.sft` and its like: errors are raised in place of exit codes."""
    values = config.model_dump(exclude_unset=True) if isinstance(config, Concern) else dict(config)
    code = run(command, (), values=values)
    if code == PreemptedError.exit_code:
        raise PreemptedError("the run was stopped and saved a checkpoint: start it again to go on")
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise TrainingError(f"swiftcp {command} ended with exit code {code}: its output says why")
