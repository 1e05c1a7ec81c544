"""A rank's place among those that share each matrix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorPlace:
    """Ranks of tensor parallelism, and those of the experts, which have their own."""

    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1

    def of(self, *, is_expert: bool) -> tuple[int, int]:
        """(rank, size) for a dense matrix, or for an expert's."""
        return (self.expert_tp_rank, self.expert_tp_size) if is_expert else (self.tp_rank, self.tp_size)


WHOLE = TensorPlace()
"""That of a rank which holds all of each matrix."""
