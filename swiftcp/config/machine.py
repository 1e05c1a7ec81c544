"""What a run has to work with, as the launcher found it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The ranks of a run and this machine's devices."""

    world_size: int
    """Ranks on all machines."""
    local_world_size: int
    """Ranks on this machine."""
    num_gpus: int
    """GPUs that this machine's ranks may use."""
