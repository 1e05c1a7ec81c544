"""SIGTERM and SIGUSR1 during training: remembered, agreed on by all ranks at a step's end, then acted upon.

Nothing is saved in the handler.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from swiftcp.parallel.mesh import Mesh
from swiftcp.rank import STOP_SIGNALS


class StopRequest:
    """Whether this rank, or any, was asked to stop."""

    def __init__(self) -> None:
        self.received = False

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True

    def agreed(self, mesh: Mesh) -> bool:
        """True on all ranks if any was asked. Called on all ranks at the same step."""
        if mesh.world_size == 1:
            return self.received
        flag = torch.tensor([int(self.received)], dtype=torch.int32, device=mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Inside, SIGTERM and SIGUSR1 set the request in place of ending the process. Only the main thread can; elsewhere nothing changes."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {signum: signal.signal(signum, request._receive) for signum in STOP_SIGNALS}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
