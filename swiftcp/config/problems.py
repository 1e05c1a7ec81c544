"""Reports several errors as one."""

from __future__ import annotations

from collections.abc import Sequence

from swiftcp.errors import ConfigError


def raise_all(problems: Sequence[str]) -> None:
    """Raises: ConfigError: there are problems; it lists them all."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} errors:", *(f"  - {problem}" for problem in problems)]))
