"""Where a value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["command line", "python", "environment", "recipe", "default"]
RawValue = object
"""Text as the user wrote it, a list of such texts, or None; from Python any value."""


@dataclass(frozen=True)
class Origin:
    """The level that a value was taken from, and the place on it."""

    level: Level
    place: str = ""
    """`train.yaml:3`, a variable's name, or why a default is what it is."""

    def __str__(self) -> str:
        if not self.place:
            return self.level
        return self.place if self.level == "recipe" else f"{self.level}: {self.place}"


@dataclass(frozen=True)
class Given:
    """One value that a user gave, under the name that they used."""

    name: str
    value: RawValue
    origin: Origin
