"""Where a run stands: counters, position in the data, and what of the recipe changes the result. Kept as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from swiftcp.config.paths import STATE_FILE
from swiftcp.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class RunState:
    """A run between two optimizer steps."""

    step: int
    """Optimizer steps done, skipped ones included."""
    epoch: int
    """Epochs that are finished."""
    global_batches: int
    """Global batches of the unfinished epoch that are done: the next one is trained first after a resume."""
    samples: int
    """Rows trained on since the beginning."""
    tokens: int
    """Real tokens since the beginning."""
    labelled_tokens: int
    plan_hash: str
    """Of the plan of the unfinished epoch: the data, and how it is packed and ordered."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe that change the result, with their values (JSON types)."""
    skipped_steps: int = 0
    eval_loss: float | None = None
    """The loss over the validation rows at this very step; None where there was no evaluation, or no finite loss."""
    has_optimizer: bool = True
    """Whether the checkpoint holds the optimizer's state."""
    elapsed_seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Raises: ValueError, TypeError: the text is no JSON, or has other fields."""
        return cls(**json.loads(text))

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """The state that a checkpoint folder holds.

        Raises:
            CheckpointError: the file cannot be read or has other fields.
        """
        try:
            return cls.from_json((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            known = ", ".join(one.name for one in fields(cls))
            raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read ({error}); it must hold {known}") from error


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to go on under a recipe that gives another result than the one that was begun.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    current = json.loads(json.dumps(dict(current)))  # as it would have been saved: tuples are lists
    absent = "(not set)"
    differing = [
        f"  {key}: {saved.get(key, absent)!r} there, {current.get(key, absent)!r} now"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key, absent) != current.get(key, absent)
    ]
    if differing:
        remedy = "Set them back to continue that run, or start anew in another output_dir."
        raise ConfigError("\n".join([f"the recipe differs from that of {checkpoint} in what changes the result:", *differing, remedy]))
