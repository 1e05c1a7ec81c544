"""Runs functions on several ranks that are started once and used again, for importing torch and megatron costs seconds each.

    def loss_on_each_rank(folder): ...            # a module-level function of a test module; runs in every rank
    results = ranks.run(loss_on_each_rank, folder, num_ranks=2)   # a list, one result a rank

Each call has a process group of its own (`num_ranks` of the pool's processes), so that layouts of 1, 2 and 4 ranks run on
one pool. An error on any rank fails the call with that rank's traceback.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

TIMEOUT_SECONDS = 300
MAX_THREADS = 150
"""Of a rank between two functions; some leave groups of gloo behind, whose threads poll for ever, and hundreds of them stop a machine."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _join(rank: int, num_ranks: int, port: int, device: str) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    from swiftcp.parallel import mesh

    mesh.stop()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))


def _serve(rank: int, connection: Connection, device: str) -> None:
    """What each rank process does until it is told to stop: join, call, answer."""
    warnings.simplefilter("ignore")  # megatron-core warns of each package that it would use on a GPU
    from swiftcp.rank import prepare_rank

    prepare_rank(device)
    import torch

    from swiftcp.parallel import cpu_shim, mesh

    torch.set_num_threads(1)
    if device == "cpu":
        cpu_shim.install()
    gc.freeze()
    while (request := connection.recv()) is not None:
        function, arguments, num_ranks, port = request
        try:
            _join(rank, num_ranks, port, device)
            result = function(*arguments)
            # All ranks leave at once: NCCL waits for those that are still in a group.
            mesh.stop()
            gc.collect()  # a model holds its groups in a cycle
            connection.send((True, result, psutil.Process().num_threads()))
        except BaseException:
            connection.send((False, traceback.format_exc(), psutil.Process().num_threads()))


class RankError(AssertionError):
    """A function failed on a rank; holds that rank's traceback."""


class RankPool:
    """Processes that wait for functions to run."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        """`device`: cpu, with gloo, or cuda, with NCCL and a GPU a rank."""
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["OMP_NUM_THREADS"] = "1"
        self._size, self._device = size, device
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._device), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int) -> list[Any]:
        """Call `function(*arguments)` on `num_ranks` ranks at once.

        Returns:
            Each rank's result. Functions and results must be picklable (tensors are; models are not).

        Raises:
            RankError: with the traceback of the first rank that failed.
        """
        port = _free_port()
        connections = self._connections[:num_ranks]
        for connection in connections:
            connection.send((function, arguments, num_ranks, port))
        answers: list[Any] = []
        for rank, connection in enumerate(connections):
            if not connection.poll(TIMEOUT_SECONDS):
                self.stop()
                raise RankError(f"rank {rank} did not answer {function.__name__} within {TIMEOUT_SECONDS} s")
            answers.append(connection.recv())
        if max(num_threads for _, _, num_threads in answers) > MAX_THREADS:
            self.stop()
            self._start()
        failed = [(rank, text) for rank, (ok, text, _) in enumerate(answers) if not ok]
        if failed:
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed))
        return [result for _, result, _ in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
