"""Finds out which rank this process is, or which ranks it is to start, from what launchers leave in the environment.

In this order: a launcher of ranks (torchrun), SLURM's tasks, NNODES and NODE_RANK, and with none of them this machine alone.
Invariant: variables that disagree are an error here, not a hang when ranks look for each other.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from swiftcp.config.environment import is_loopback
from swiftcp.config.slurm import FIRST_PORT, NUM_PORTS
from swiftcp.config.wording import counted
from swiftcp.errors import ConfigError
from swiftcp.launch import LOOPBACK, rank_variables

_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Topology:
    """All ranks of a run, and this process among them."""

    source: str
    """Who said so: `torchrun`, `swiftcp` (its own launcher), `SLURM`, `NNODES` or `this machine`."""
    num_nodes: int
    node_rank: int
    local_world_size: int
    local_rank: int | None
    """None: this process is no rank, it starts those of its machine."""
    master_addr: str = LOOPBACK
    master_port: int | None = None
    """None: a free one."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.local_world_size

    @property
    def rank(self) -> int | None:
        return None if self.local_rank is None else self.node_rank * self.local_world_size + self.local_rank

    def gpus_of_node(self, num_visible: int) -> int:
        """GPUs of this node's ranks, where this process sees so many: `srun --gpus-per-task=1` shows each rank its own alone."""
        own_alone = self.source == "SLURM" and self.local_rank is not None and num_visible == 1
        return self.local_world_size if own_alone else num_visible

    def variables(self) -> dict[str, str]:
        """What torch's rendezvous reads, for a process that is a rank of several."""
        assert self.local_rank is not None and self.master_port is not None
        meeting_point = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
        return meeting_point | rank_variables(self.local_rank, self.local_world_size, node_rank=self.node_rank, num_nodes=self.num_nodes)

    def describe(self) -> str:
        meeting_point = f", meeting at {self.master_addr}:{self.master_port}" if self.master_port else ""
        if self.num_nodes > 1 and is_loopback(self.master_addr):
            meeting_point += " (this machine alone: nodes on other machines would never come)"
        return f"ranks from {self.source}: {counted(self.num_nodes, 'node')} x {self.local_world_size}{meeting_point}"


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise ConfigError(f"environment: {name}='{text}' is no whole number: correct or unset it")
    return int(text)


def _first(environment: Mapping[str, str], *names: str) -> int | None:
    return next((value for name in names if (value := _integer(environment, name)) is not None), None)


def _agree(what: str, found: Mapping[str, int | None]) -> None:
    """Raises: ConfigError: two of these names, each with its value or None, say different things."""
    known = {name: value for name, value in found.items() if value is not None}
    if len(set(known.values())) > 1:
        raise ConfigError(f"the {what} is contradictory: {', '.join(f'{name}={value}' for name, value in known.items())}: set one")


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise ConfigError(f"environment: {name}={value} is not below {limit_name}={limit}: correct the launcher's variables")


def _meeting_point(environment: Mapping[str, str], who: str) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, which must be there."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(f"{who} without {' and '.join(missing)}: ranks would not find each other: set them alike on every node")
    address, port = environment["MASTER_ADDR"], _integer(environment, "MASTER_PORT")
    assert port is not None
    return address, port


def _from_torchrun(environment: Mapping[str, str], nproc_per_node: int | None) -> Topology | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (_integer(environment, name) for name in names)
    if rank is None and world_size is None and local_rank is None:
        return None
    if rank is None or world_size is None or local_rank is None:
        found = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
        lacking = ", ".join(name for name in names if not environment.get(name))
        raise ConfigError(
            f"{found} without {lacking}: torchrun sets all three; to describe machines set NNODES and NODE_RANK; or unset them"
        )
    local_world_size = _first(environment, "LOCAL_WORLD_SIZE") or nproc_per_node or world_size
    _agree("number of ranks of a node", {"LOCAL_WORLD_SIZE": local_world_size, "nproc_per_node": nproc_per_node})
    _below("RANK", rank, "WORLD_SIZE", world_size)
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    num_nodes, rest = divmod(world_size, local_world_size)
    if rest or rank % local_world_size != local_rank:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} do not fit: "
            "start equally many ranks on each node"
        )
    _agree("number of nodes", {"NNODES": _first(environment, "NNODES"), "WORLD_SIZE / LOCAL_WORLD_SIZE": num_nodes})
    _one_launcher_per_node(environment)
    if world_size == 1:
        return Topology("torchrun", 1, 0, 1, 0)
    address, port = _meeting_point(environment, "RANK and WORLD_SIZE")
    source = environment.get("SWIFTCP_LAUNCHER", "torchrun")
    return Topology(source, num_nodes, rank // local_world_size, local_world_size, local_rank, address, port)


def _one_launcher_per_node(environment: Mapping[str, str]) -> None:
    """Raises: ConfigError: srun started torchrun once a rank, where once a node is right."""
    num_tasks = _integer(environment, "SLURM_STEP_NUM_TASKS")
    num_nodes = _integer(environment, "SLURM_STEP_NUM_NODES")
    if "TORCHELASTIC_RUN_ID" in environment and num_tasks and num_nodes and num_tasks > num_nodes:
        raise ConfigError(
            f"srun started torchrun {num_tasks} times on {num_nodes} nodes, and each starts all ranks of its node: "
            "use srun --ntasks-per-node=1, or srun swiftcp without torchrun"
        )


def _slurm_sizes(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(tasks, nodes) of the job step that this process is a task of; None outside of a step."""
    num_tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if _integer(environment, "SLURM_PROCID") is None or num_tasks is None:
        return None
    in_batch_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if in_batch_script and num_tasks > 1:
        raise ConfigError(f"the job has {num_tasks} tasks, but this one was not started by srun: write srun in front of the command")
    return num_tasks, _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1


def _slurm_meeting_point(environment: Mapping[str, str], num_nodes: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT where they are set, else the job's first node and a port that its id gives."""
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in lists if environment.get(name)), "")
    job = _integer(environment, "SLURM_JOB_ID")
    found = {
        "MASTER_ADDR": LOOPBACK if num_nodes == 1 else first_host(nodes),
        "MASTER_PORT": str(_DEFAULT_PORT if job is None else FIRST_PORT + job % NUM_PORTS),
    }
    given = {name: environment[name] for name in found if environment.get(name)}
    address, port = _meeting_point(found | given, f"SLURM with {num_nodes} nodes")
    if num_nodes > 1 and is_loopback(address) and not is_loopback(found["MASTER_ADDR"]):
        raise ConfigError(
            f"MASTER_ADDR={address} is each node itself, but the job's nodes are {nodes}: "
            f"set MASTER_ADDR={found['MASTER_ADDR']}, or unset it"
        )
    return address, port


def first_host(node_list: str) -> str:
    """The first name of a SLURM node list: `gpu[07-09,12],cpu1` gives `gpu07`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", node_list)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def _from_slurm(environment: Mapping[str, str], sizes: tuple[int, int], nproc_per_node: int | None, default_nproc: int) -> Topology:
    num_tasks, num_nodes = sizes
    rank = _integer(environment, "SLURM_PROCID") or 0
    _below("SLURM_PROCID", rank, "the number of tasks", num_tasks)
    if num_tasks % num_nodes:
        raise ConfigError(f"SLURM: {num_tasks} tasks do not spread evenly over {num_nodes} nodes: set --ntasks-per-node")
    tasks_per_node = num_tasks // num_nodes
    node_rank = _first(environment, "SLURM_NODEID")
    node_rank = rank // tasks_per_node if node_rank is None else node_rank
    local_rank = _first(environment, "SLURM_LOCALID")
    local_rank = rank % tasks_per_node if local_rank is None else local_rank
    if node_rank * tasks_per_node + local_rank != rank:
        raise ConfigError(
            f"SLURM_PROCID={rank}, SLURM_NODEID={node_rank} and SLURM_LOCALID={local_rank} do not fit {tasks_per_node} tasks a node: "
            "use srun --distribution=block with equally many tasks on each node"
        )
    _agree("number of nodes", {"NNODES": _first(environment, "NNODES"), "SLURM's number of nodes": num_nodes})
    _agree("rank of this node", {"NODE_RANK": _first(environment, "NODE_RANK"), "SLURM_NODEID": node_rank})
    address, port = _slurm_meeting_point(environment, num_nodes)
    nproc = nproc_per_node or default_nproc
    if tasks_per_node == 1 and nproc > 1:
        return Topology("SLURM", num_nodes, node_rank, nproc, None, address, port)
    _agree("number of ranks of a node", {"SLURM's tasks of a node": tasks_per_node, "nproc_per_node": nproc_per_node})
    return Topology("SLURM", num_nodes, node_rank, tasks_per_node, local_rank, address, port)


def _from_nodes(environment: Mapping[str, str], nproc: int) -> Topology | None:
    num_nodes, node_rank = _integer(environment, "NNODES"), _integer(environment, "NODE_RANK")
    if num_nodes is None and not node_rank:
        return None
    if num_nodes is None or (node_rank is None and num_nodes > 1):
        lacking, found = ("NNODES", f"NODE_RANK={node_rank}") if num_nodes is None else ("NODE_RANK", f"NNODES={num_nodes}")
        raise ConfigError(f"{found} without {lacking}: set both, MASTER_ADDR and MASTER_PORT on every node, or none")
    if num_nodes == 0:
        raise ConfigError("NNODES=0: set the number of machines, or unset it")
    _below("NODE_RANK", node_rank or 0, "NNODES", num_nodes)
    if num_nodes == 1:
        return None
    address, port = _meeting_point(environment, f"NNODES={num_nodes}")
    return Topology("NNODES", num_nodes, node_rank or 0, nproc, 0 if nproc == 1 else None, address, port)


def _alone(environment: Mapping[str, str], nproc: int) -> Topology:
    port = _integer(environment, "MASTER_PORT") if nproc > 1 else None
    if port is not None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, port))
            except OSError as error:
                raise ConfigError(f"MASTER_PORT={port} cannot be used ({error.strerror}): unset it, and a free one is taken") from None
    return Topology("this machine", 1, 0, nproc, 0 if nproc == 1 else None, LOOPBACK, port)


def find_topology(environment: Mapping[str, str], *, nproc_per_node: int | None, num_gpus: int, model_parallel_size: int) -> Topology:
    """All ranks of the run, and which of them this process is, if any.

    Args:
        nproc_per_node: ranks of a machine, if the user says so; by default every GPU, or on a CPU what one model needs.
        num_gpus: GPUs of this machine that the run is to use.
        model_parallel_size: ranks that one copy of the model needs.
    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    torchrun = _from_torchrun(environment, nproc_per_node)
    if torchrun is not None:
        return torchrun
    sizes = _slurm_sizes(environment)
    num_nodes = _integer(environment, "NNODES") or (sizes[1] if sizes else 1)
    default_nproc = num_gpus or -(-model_parallel_size // num_nodes)
    nproc = nproc_per_node or default_nproc
    if sizes is not None and sizes != (1, 1):
        return _from_slurm(environment, sizes, nproc_per_node, default_nproc)
    return _from_nodes(environment, nproc) or _alone(environment, nproc)
