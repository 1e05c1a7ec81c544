"""The checkpoints of a run: which are complete, which is the newest, which may go.

A checkpoint is complete when it bears the marker, which is written last and lists every file with its size and SHA-256. The
folders themselves say what is there: `latest` and `best` are for people and scripts, and nothing here trusts them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from swiftcp.checkpoint.durable import UNFINISHED, flush, remove_folder, write_text
from swiftcp.checkpoint.run_state import RunState
from swiftcp.checkpoint.together import from_first_rank, gather_all, is_first_rank, rank_and_size
from swiftcp.config.paths import CHECKPOINTS_FOLDER, MARKER_FILE
from swiftcp.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST_FILE = "latest"
BEST_FILE = "best"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class FileRecord:
    """What one file must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """What makes a checkpoint complete."""

    number: int
    """Counts the saves into an output folder: the newest has the highest, also after a run went back to an older step."""
    files: Mapping[str, FileRecord]
    """By path relative to the checkpoint."""

    def write(self, checkpoint: Path) -> None:
        write_text(checkpoint / MARKER_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, checkpoint: Path) -> Marker | None:
        """None where there is none, or none that can be read."""
        try:
            values = json.loads((checkpoint / MARKER_FILE).read_text(encoding="utf-8"))
            return cls(int(values["number"]), {name: FileRecord(**record) for name, record in values["files"].items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def checkpoints_folder(output_dir: Path) -> Path:
    return output_dir / CHECKPOINTS_FOLDER


def step_folder(output_dir: Path, step: int) -> Path:
    return checkpoints_folder(output_dir) / f"step-{step:06d}"


def record_file(file: Path) -> FileRecord:
    """Flush a file to the disk and take down what it holds."""
    flush(file)
    return _measure(file)


def _measure(file: Path) -> FileRecord:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(file.stat().st_size, digest)


def _problem(checkpoint: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with one file."""
    file = checkpoint / name
    if not file.is_file():
        return f"{file} is missing"
    if file.stat().st_size != record.num_bytes:
        return f"{file} has {file.stat().st_size} bytes instead of {record.num_bytes}"
    if _measure(file) != record:
        return f"{file} does not hold what was written (its checksum differs)"
    return None


def _not_completed(checkpoint: Path) -> str:
    return f"{checkpoint / MARKER_FILE} is missing or cannot be read: the checkpoint was not completed"


def find_problems(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint; empty if it is whole. Called on all ranks, which share the files out among them."""
    marker = from_first_rank(Marker.read(checkpoint))
    if marker is None:
        return [_not_completed(checkpoint)]
    rank, size = rank_and_size()
    mine = sorted(marker.files.items())[rank::size]
    problems = [problem for name, record in mine if (problem := _problem(checkpoint, name, record))]
    return [problem for found in gather_all(problems) for problem in found]


def _folders(output_dir: Path) -> list[Path]:
    folder = checkpoints_folder(output_dir)
    return sorted(path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)) if folder.is_dir() else []


def completed(output_dir: Path) -> list[Path]:
    """Checkpoints that bear a marker, oldest save first. Their files are not looked at."""
    return [path for _, path in _numbered(output_dir)]


def next_number(output_dir: Path) -> int:
    """The number of the next save."""
    return 1 + max((number for number, _ in _numbered(output_dir)), default=0)


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """(number of the save, folder) of each checkpoint that bears a marker, in order."""
    return sorted((marker.number, path) for path in _folders(output_dir) if (marker := Marker.read(path)))


def find_latest(output_dir: Path, *, strict: bool = False) -> Path | None:
    """The newest checkpoint that is whole; None if the run never completed one. Called on all ranks.

    Damaged and unfinished folders are named in warnings and passed over.

    Raises:
        CheckpointError: there are checkpoints and none is whole; or, if `strict`, one that would be passed over is damaged.
    """
    without_marker, newest_first = from_first_rank(_candidates(output_dir) if is_first_rank() else None)
    problems = [_not_completed(path) for path in without_marker]
    for checkpoint in newest_first:
        found = find_problems(checkpoint)
        if not found:
            _pass_over(problems, strict)
            return checkpoint
        problems += found
    _pass_over(
        problems,
        strict=True,
        remedy=f"no checkpoint in {checkpoints_folder(output_dir)} is whole; delete the damaged folders to begin anew",
    )
    return None


def _candidates(output_dir: Path) -> tuple[list[Path], list[Path]]:
    newest_first = completed(output_dir)[::-1]
    return [path for path in _folders(output_dir) if path not in newest_first], newest_first


def _pass_over(problems: Iterable[str], strict: bool, remedy: str = "resume_strict forbids to use an older checkpoint") -> None:
    problems = list(problems)
    if problems and strict:
        raise CheckpointError("\n  ".join([f"{remedy}:", *problems]))
    if is_first_rank():
        for problem in problems:
            logger.warning("passed over a damaged checkpoint: %s", problem)


def point_latest(checkpoint: Path) -> None:
    """Let `latest`, a text file beside the checkpoints' folders, name this one."""
    write_text(checkpoint.parent / LATEST_FILE, checkpoint.name + "\n")


def find_best(output_dir: Path) -> Path | None:
    """The checkpoint with the lowest loss over the validation rows, the oldest of equals; None if none was saved behind an evaluation."""
    losses = [(loss, age, path) for age, path in enumerate(completed(output_dir)) if (loss := _eval_loss(path)) is not None]
    return min(losses)[-1] if losses else None


def _eval_loss(checkpoint: Path) -> float | None:
    try:
        return RunState.read(checkpoint).eval_loss
    except CheckpointError:
        return None


def point_best(output_dir: Path) -> None:
    """Let `best` name the best checkpoint, if any was evaluated."""
    pointer, best = checkpoints_folder(output_dir) / BEST_FILE, find_best(output_dir)
    if best is not None:
        write_text(pointer, best.name + "\n")
    else:
        pointer.unlink(missing_ok=True)


def prune(output_dir: Path, limit: int) -> None:
    """Keep the newest `limit` complete checkpoints, and the best one. Folders without a marker are not ours to delete."""
    best = find_best(output_dir)
    for checkpoint in completed(output_dir)[:-limit]:
        if checkpoint != best:
            remove_folder(checkpoint)


def remove_unfinished(output_dir: Path) -> None:
    """Delete what a crash in a save or a deletion left behind."""
    for path in checkpoints_folder(output_dir).glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(path)
