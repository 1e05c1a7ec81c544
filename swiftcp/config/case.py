"""What the rules across keys look at, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swiftcp.config.concerns import Concern
from swiftcp.config.facts import Machine, ModelFacts
from swiftcp.config.resolved import Origin


@dataclass(frozen=True)
class Case:
    """What a rule may look at."""

    config: Any
    """A config model; a rule first asks for the concerns that not every command has."""
    origins: dict[str, Origin]
    machine: Machine
    facts: ModelFacts | None
    """None where the model folder cannot be read, which is a problem of its own."""

    def has(self, *concerns: type[Concern]) -> bool:
        return all(isinstance(self.config, concern) for concern in concerns)

    def given(self, key: str) -> bool:
        """Whether the user set this key, rather than its default."""
        return self.origins[key].level != "default"

    @property
    def two_cp(self) -> int:
        return 2 * self.config.context_parallel_size

    @property
    def data_parallel_size(self) -> int | None:
        """None where the ranks do not divide, which is a problem of its own."""
        num_replicas, rest = divmod(self.machine.world_size, self.config.model_parallel_size)
        return None if rest else num_replicas


Finding = tuple[str, str]
"""The key whose origin is shown, and the message."""
Rule = Callable[[Case], Iterator[Finding]]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
