"""Which rank a process is, from what launchers leave in the environment."""

from __future__ import annotations

import socket

import pytest

from swiftcp.errors import ConfigError
from swiftcp.topology import Topology, find_topology, first_host

TORCHRUN = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="node0", MASTER_PORT="29500")
SRUN = dict(
    SLURM_PROCID="5",
    SLURM_NTASKS="8",
    SLURM_NNODES="2",
    SLURM_NODEID="1",
    SLURM_LOCALID="1",
    SLURM_JOB_ID="123",
    SLURM_STEP_ID="0",
    SLURM_JOB_NODELIST="gpu[07-08]",
)
NODES = dict(NNODES="2", NODE_RANK="1", MASTER_ADDR="node0", MASTER_PORT="29500")


def find(environment: dict[str, str], *, nproc_per_node: int | None = None, num_gpus: int = 0, model_parallel_size: int = 1) -> Topology:
    return find_topology(environment, nproc_per_node=nproc_per_node, num_gpus=num_gpus, model_parallel_size=model_parallel_size)


def error_of(environment: dict[str, str], nproc_per_node: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        find(environment, nproc_per_node=nproc_per_node)
    return str(caught.value)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_this_machine_alone():
    assert find({}) == Topology("this machine", 1, 0, 1, 0)
    assert find({}, model_parallel_size=4) == Topology("this machine", 1, 0, 4, None)
    assert find({}, num_gpus=8, model_parallel_size=2).local_world_size == 8
    assert find({}, num_gpus=8, nproc_per_node=2) == Topology("this machine", 1, 0, 2, None)
    assert (find({}).world_size, find({}).rank) == (1, 0)


def test_torchrun():
    topology = find(TORCHRUN)
    assert topology == Topology("torchrun", 2, 1, 4, 1, "node0", 29500)
    assert (topology.world_size, topology.rank) == (8, 5)
    assert topology.variables() == TORCHRUN | {"GROUP_RANK": "1"}
    assert find({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == Topology("torchrun", 1, 0, 1, 0)


def test_srun_starts_ranks():
    topology = find(SRUN)
    assert topology == Topology("SLURM", 2, 1, 4, 1, "gpu07", 12123)
    assert topology.variables()["RANK"] == "5"
    assert "2 nodes x 4, meeting at gpu07:12123" in topology.describe()


def test_srun_on_one_node_meets_on_the_loopback():
    environment = SRUN | dict(SLURM_NNODES="1", SLURM_NODEID="0", SLURM_LOCALID="5")
    assert find(environment).master_addr == "127.0.0.1"


def test_srun_starts_one_launcher_per_node():
    environment = SRUN | dict(SLURM_NTASKS="2", SLURM_PROCID="1", SLURM_LOCALID="0")
    assert find(environment, num_gpus=8) == Topology("SLURM", 2, 1, 8, None, "gpu07", 12123)
    assert find(environment, model_parallel_size=4).local_world_size == 2
    assert find(environment).rank == 1


def test_a_lone_slurm_task_is_this_machine_alone():
    environment = dict(SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_NNODES="1", ENVIRONMENT="BATCH")
    assert find(environment, model_parallel_size=2) == Topology("this machine", 1, 0, 2, None)


def test_nodes_described_by_variables():
    assert find(NODES, nproc_per_node=4) == Topology("NNODES", 2, 1, 4, None, "node0", 29500)
    assert find(NODES, model_parallel_size=2).rank == 1
    assert find({"NNODES": "1", "NODE_RANK": "0"}) == Topology("this machine", 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu1", "gpu07"), ("gpu[3,5]", "gpu3"), ("r[1-2]n,b", "r1n"), ("a.b-c,d", "a.b-c")],
)
def test_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        (without(TORCHRUN, "LOCAL_RANK"), "without LOCAL_RANK"),
        (dict(WORLD_SIZE="2"), "without RANK, LOCAL_RANK"),
        (TORCHRUN | dict(RANK="8"), "RANK=8 is not below WORLD_SIZE=8"),
        (TORCHRUN | dict(LOCAL_RANK="4"), "LOCAL_RANK=4 is not below"),
        (TORCHRUN | dict(LOCAL_RANK="2"), "do not fit"),
        (TORCHRUN | dict(RANK="one"), "RANK='one' is no whole number"),
        (TORCHRUN | dict(NNODES="4"), "number of nodes is contradictory: NNODES=4"),
        (without(TORCHRUN, "MASTER_PORT"), "without MASTER_PORT"),
        (TORCHRUN | dict(TORCHELASTIC_RUN_ID="x", SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NUM_NODES="2"), "--ntasks-per-node=1"),
        (SRUN | dict(SLURM_PROCID="8"), "SLURM_PROCID=8 is not below"),
        (SRUN | dict(SLURM_NTASKS="7"), "do not spread evenly"),
        (SRUN | dict(SLURM_LOCALID="2"), "--distribution=block"),
        (SRUN | dict(NNODES="3"), "NNODES=3, SLURM's number of nodes=2"),
        (SRUN | dict(NODE_RANK="0"), "NODE_RANK=0, SLURM_NODEID=1"),
        (
            SRUN | dict(MASTER_ADDR="127.0.0.1"),
            "MASTER_ADDR=127.0.0.1 is each node itself, but the job's nodes are gpu[07-08]: set MASTER_ADDR=gpu07",
        ),
        (without(SRUN, "SLURM_JOB_NODELIST"), "without MASTER_ADDR"),
        (without(SRUN, "SLURM_STEP_ID") | dict(ENVIRONMENT="BATCH"), "write srun in front"),
        (without(NODES, "NODE_RANK"), "NNODES=2 without NODE_RANK"),
        (without(NODES, "NNODES"), "NODE_RANK=1 without NNODES"),
        (without(NODES, "MASTER_ADDR", "MASTER_PORT"), "without MASTER_ADDR and MASTER_PORT"),
        (NODES | dict(NODE_RANK="2"), "NODE_RANK=2 is not below NNODES=2"),
        (NODES | dict(NNODES="0"), "NNODES=0"),
    ],
)
def test_case_37_variables_that_do_not_agree_are_refused(environment, part):
    assert part in error_of(environment)


def test_case_37_ranks_of_a_node_must_agree_with_the_option():
    assert "LOCAL_WORLD_SIZE=4, nproc_per_node=2" in error_of(TORCHRUN, nproc_per_node=2)
    assert "tasks of a node=4, nproc_per_node=8" in error_of(SRUN, nproc_per_node=8)


def test_case_37_a_port_in_use_is_refused():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"MASTER_PORT={port} cannot be used" in error_of({"MASTER_PORT": str(port)}, nproc_per_node=2)


def test_torchrun_inside_a_batch_script_is_fine():
    assert find(TORCHRUN | without(SRUN, "SLURM_STEP_ID") | dict(ENVIRONMENT="BATCH")).source == "torchrun"


@pytest.mark.parametrize("environment", [TORCHRUN, NODES])
def test_nodes_on_one_machine_may_meet_on_the_loopback(environment):
    assert "this machine alone" in find(environment | dict(MASTER_ADDR="127.0.0.1")).describe()


def test_a_rank_of_srun_that_sees_one_gpu_has_its_own():
    assert find(SRUN, num_gpus=1).gpus_of_node(1) == 4
    assert find(SRUN, num_gpus=4).gpus_of_node(4) == 4
    assert find(SRUN | dict(SLURM_NTASKS="2", SLURM_PROCID="1", SLURM_LOCALID="0"), num_gpus=2).gpus_of_node(1) == 1
    assert find(TORCHRUN).gpus_of_node(1) == 1
