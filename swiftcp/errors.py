"""The errors that users meet.

Each is also a standard error, so that callers may catch either kind. `exit_code` is what the command line ends with
(docs: exit codes). All are picklable, for they cross process borders.
"""

from __future__ import annotations

from collections.abc import Sequence


class SwiftcpError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = 1


class ConfigError(SwiftcpError, ValueError):
    """A recipe, option, environment variable or layout is wrong. The message names value, rule and remedy."""

    exit_code = 2


def raise_config_errors(problems: Sequence[str]) -> None:
    """Raises: ConfigError: there are problems; it lists them all."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} errors:", *(f"  - {problem}" for problem in problems)]))


class DataError(SwiftcpError, ValueError):
    """A row, a medium or a data file is wrong. The message names file, line, value and remedy."""

    exit_code = 2


class WeightsError(SwiftcpError, ValueError):
    """A model folder does not hold what its configuration says. The message names the tensors."""

    exit_code = 2


class CheckpointError(SwiftcpError, RuntimeError):
    """A training checkpoint cannot be written, is damaged or does not fit the run."""


class TrainingError(SwiftcpError, RuntimeError):
    """Training cannot go on: a rank failed, or a loss or gradient is not finite."""


class LostContactError(TrainingError):
    """Another rank is gone. What ended it says more than this."""


_LOST_CONTACT = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "socket closed")


def is_lost_contact(error: BaseException) -> bool:
    """Whether torch says that another rank is gone. gloo has no error of its own for it, only words."""
    if isinstance(error, SwiftcpError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in _LOST_CONTACT)


class PreemptedError(SwiftcpError, RuntimeError):
    """The run was asked to stop and saved a checkpoint: start it again to go on."""

    exit_code = 75
