"""Fine-tuning of multimodal models under context parallelism. Importing this imports nothing heavy and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftcp.config import TrainConfig

__version__ = "0.1.0"

__all__ = ["__version__", "pt", "sft"]


def sft(config: TrainConfig | Mapping[str, Any]) -> None:
    """Supervised fine-tuning, as `swiftcp sft`: loss on assistant turns.

    Args:
        config: the keys of `swiftcp sft --help`; environment variables count below them.
    Raises:
        ConfigError: the configuration is wrong.
        TrainingError: a rank process failed.
        PreemptedError: the run was stopped and saved a checkpoint.
    """
    from swiftcp.run import run_from_python

    run_from_python("sft", config)


def pt(config: TrainConfig | Mapping[str, Any]) -> None:
    """(Continued) pre-training, as `swiftcp pt`: loss on every text token, no chat template. Otherwise as `sft`."""
    from swiftcp.run import run_from_python

    run_from_python("pt", config)
