"""Where a run's log goes beside `logging.jsonl`. A tracker that fails is told once and left out: training never stops for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RUNS_FOLDER = "runs"
"""TensorBoard's events, in the output folder."""


class TensorBoard:
    """Scalars of each logged step, as events under `output_dir/runs`."""

    def __init__(self, output_dir: Path, first_step: int) -> None:
        """Events of `first_step` and later, of an earlier start of the run, are marked as outdated."""
        self._writer: Any = None
        self._attempt(lambda: self._open(output_dir / RUNS_FOLDER, first_step))

    def _open(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=30)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Each value under its own name."""
        if self._writer is not None:
            self._attempt(lambda: self._add(scalars, step))

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong (a full disk, a broken package), it is TensorBoard's problem alone."""
        try:
            action()
        except Exception as error:
            self._writer = None
            logger.warning("TensorBoard events are no longer written: %s: %s", type(error).__name__, error)
