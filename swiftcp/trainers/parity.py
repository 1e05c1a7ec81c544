"""`swiftcp parity`: proof that a layout gives what one rank gives, and what `transformers` gives.

Three runs over the same rows, each in processes of its own: `transformers`, one row at a time; one rank, one row at a time;
the layout that the user chose, packed as chosen. This module starts them and compares what they wrote; it imports no torch.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from swiftcp.config.concerns import ParallelConfig
from swiftcp.errors import ConfigError, TrainingError
from swiftcp.launch import launch_local
from swiftcp.rank import STOP_SIGNALS

if TYPE_CHECKING:
    from swiftcp.config import ParityConfig, ResolvedConfig


@dataclass(frozen=True)
class Tolerances:
    """How far apart two runs may be, as shares of the value or, where it is larger, of the unit named."""

    logprob: float
    """Largest difference of a log-probability, times max(1, its size)."""
    loss: float
    """Relative."""
    grad_norm: float
    """Relative."""
    gradient: float
    """Length of a parameter's gradient difference, relative to its own length or to 1e-3 of the longest gradient."""


FLOAT32 = Tolerances(logprob=1e-5, loss=1e-6, grad_norm=1e-5, gradient=1e-5)
"""Rounding alone, in another order of summation."""


_TOLD = (ConfigError.exit_code, 130, *(128 + signum for signum in STOP_SIGNALS))
"""Exit codes of a stage that was stopped, or has said what is wrong with the recipe or its data."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    what: str
    reference: float
    value: float
    difference: float
    tolerance: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # false for NaN


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12)


def _largest(checks: Iterable[Check], otherwise: Check) -> Check:
    """The check with the largest difference, and NaN is larger than any; `otherwise` where there is none."""
    return max(checks, key=lambda check: (math.isnan(check.difference), check.difference), default=otherwise)


def _logprob_check(what: str, got: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], tolerance: float) -> Check:
    """The largest difference over all rows and positions; its row and position as the detail."""
    checks = (
        Check(what, theirs, ours, abs(ours - theirs) / max(1.0, abs(theirs)), tolerance, f"row {row}, token {position}")
        for row, pairs in enumerate(zip(got, expected, strict=True))
        for position, (ours, theirs) in enumerate(zip(*pairs, strict=True), start=1)
    )
    return _largest(checks, Check(what, 0.0, 0.0, 0.0, tolerance))


def _gradient_check(what: str, got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> Check:
    """The largest difference over all parameters; its parameter as the detail."""
    from swiftcp.trainers.gradient_sketch import Sketch

    ours, theirs = ({name: Sketch(**one) for name, one in run.items()} for run in (got, expected))
    floor = max(1e-3 * max(one.norm for one in theirs.values()), 1e-30)
    checks = (
        Check(what, one.norm, ours[name].norm, ours[name].distance(one) / max(one.norm, floor), tolerance, name)
        for name, one in theirs.items()
    )
    return _largest(checks, Check(what, 0.0, 0.0, 0.0, tolerance))


def compare(layout: dict[str, Any], one_rank: dict[str, Any], oracle: dict[str, Any], tolerances: Tolerances) -> list[Check]:
    """All lines of the table. Each argument is what a stage of `parity_worker` wrote."""
    if layout["num_labels"] != one_rank["num_labels"]:
        return [Check("labelled tokens", one_rank["num_labels"], layout["num_labels"], math.inf, 0.0)]
    loss, norm = (_relative(layout[key], one_rank[key]) for key in ("loss", "grad_norm"))
    return [
        Check("labelled tokens, layout against one rank", one_rank["num_labels"], layout["num_labels"], 0.0, 0.0),
        Check("loss, layout against one rank", one_rank["loss"], layout["loss"], loss, tolerances.loss),
        Check("gradient norm, layout against one rank", one_rank["grad_norm"], layout["grad_norm"], norm, tolerances.grad_norm),
        _gradient_check("each gradient, layout against one rank", layout["gradients"], one_rank["gradients"], tolerances.gradient),
        _logprob_check("log-probabilities, layout against one rank", layout["logprobs"], one_rank["logprobs"], tolerances.logprob),
        _logprob_check("log-probabilities, layout against transformers", layout["logprobs"], oracle["logprobs"], tolerances.logprob),
        _logprob_check("log-probabilities, one rank against transformers", one_rank["logprobs"], oracle["logprobs"], tolerances.logprob),
    ]


def _print(checks: Sequence[Check], title: str) -> None:
    table = Table(title=title)
    for column in ("what", "reference", "value", "difference", "tolerance", "", "largest at"):
        table.add_column(column, justify="right" if column in ("reference", "value", "difference", "tolerance") else "left")
    for check in checks:
        numbers = [f"{check.reference:.7g}", f"{check.value:.7g}", f"{check.difference:.2e}", f"{check.tolerance:.0e}"]
        table.add_row(check.what, *numbers, "ok" if check.passed else "FAILED", check.detail)
    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(table)


def _stages(config: ParityConfig) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, ranks, keys that differ from the user's) of each run."""
    one_at_a_time = ParallelConfig(attention_backend=config.attention_backend).model_dump() | {"packing": False, "micro_batch_size": 1}
    yield "transformers", 1, one_at_a_time
    yield "one rank", 1, one_at_a_time
    yield "layout", config.nproc_per_node or config.fewest_ranks, {}


def _in_new_processes(task: dict[str, Any], num_ranks: int) -> int:
    """Run `parity_worker` on a task in rank processes of its own. Returns the exit code."""
    file = Path(task["output"]).with_suffix(".task")
    file.write_text(json.dumps(task))
    return launch_local([str(file)], num_ranks, prefix=(sys.executable, "-P", "-m", "swiftcp.trainers.parity_worker"))


def run(resolved: ResolvedConfig[ParityConfig], *, start: Callable[[dict[str, Any], int], int] = _in_new_processes) -> int:
    """Run the three stages, print the table. Returns 0, 1 where a tolerance is broken, or what a stopped stage ended with.

    Args:
        start: runs a task of `parity_worker` on a number of ranks and returns an exit code.

    Raises:
        TrainingError: a stage failed; its output says why.
    """
    config = resolved.config
    results = {}
    with tempfile.TemporaryDirectory(prefix="swiftcp-parity-") as folder:
        for stage, num_ranks, changes in _stages(config):
            started = time.monotonic()
            output = Path(folder) / f"{stage}.json"
            code = start({"stage": stage, "config": config.model_dump() | changes, "output": str(output)}, num_ranks)
            if code in _TOLD:
                return code
            if code:
                raise TrainingError(f"parity: the stage {stage!r} ended with exit code {code}: its output says why")
            results[stage] = json.loads(output.read_text())
            print(f"{stage}: {num_ranks} rank(s), {time.monotonic() - started:.0f} s", flush=True)
    checks = compare(results["layout"], results["one rank"], results["transformers"], FLOAT32)
    _print(checks, results["layout"]["description"])
    failed = [check for check in checks if not check.passed]
    print("parity holds" if not failed else f"parity is BROKEN: {len(failed)} of {len(checks)} checks failed", flush=True)
    return 1 if failed else 0
