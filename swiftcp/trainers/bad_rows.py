"""`bad_rows.jsonl`, and what ranks tell each other of rows whose media cannot be decoded in the course of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from swiftcp.checkpoint.durable import write_text
from swiftcp.data.dataset import MAX_BAD_SHARE
from swiftcp.data.rows import BadRow
from swiftcp.errors import DataError

logger = logging.getLogger(__name__)

FILE = "bad_rows.jsonl"


def write_bad_rows(output_dir: Path, bad_rows: Sequence[BadRow], *, keep_decoded: bool) -> None:
    """Each row that was left out, with file, line and reason. Called on the first rank.

    Args:
        keep_decoded: the run goes on: rows that it found bad when they were to be trained stay in the list.
    """
    kept = [row for row in read_bad_rows(output_dir) if row.kind == "decode"] if keep_decoded else []
    write_text(output_dir / FILE, "".join(map(_line, (*bad_rows, *kept))))


def read_bad_rows(output_dir: Path) -> list[BadRow]:
    """Those that are on record; a last line that was not written to its end is left out."""
    path = output_dir / FILE
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(BadRow(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def _line(row: BadRow) -> str:
    return json.dumps(asdict(row), ensure_ascii=False) + "\n"


class BadRowsOfRanks:
    """How ranks agree on rows that one of them could not decode; the first rank records them.

    It has a group of its own, on the host: batches may be read by a thread, while the training loop communicates.
    """

    def __init__(self, output_dir: Path, num_rows: int) -> None:
        """Called on all ranks.

        Args:
            num_rows: of the data set; where more than a share of them fails, it is not what it is taken for.
        """
        self._group = dist.new_group(backend="gloo")
        self._output_dir, self._num_rows = output_dir, num_rows
        self._seen = {(row.file, row.line) for row in read_bad_rows(output_dir) if row.kind == "decode"} if dist.get_rank() == 0 else set()
        self._bad: set[int] = set()

    def __call__(self, bad: Mapping[int, BadRow]) -> Mapping[int, BadRow]:
        """Those of all ranks, given those of this rank's next micro-batch. Called on all ranks together.

        Raises:
            DataError: too many rows of the data set were bad by now.
        """
        count = torch.tensor([len(bad)])
        dist.all_reduce(count, group=self._group)
        if not count.item():
            return {}
        gathered: list[Mapping[int, BadRow]] = [{}] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, dict(bad), group=self._group)
        found = {row: reason for of_rank in gathered for row, reason in of_rank.items()}
        self._bad |= found.keys()
        if dist.get_rank() == 0:
            self._record(list(found.values()))
        if len(self._bad) > MAX_BAD_SHARE * self._num_rows:
            raise DataError(f"{len(self._bad)} of {self._num_rows} rows could not be decoded, more than {MAX_BAD_SHARE:.0%}: see {FILE}")
        return found

    def _record(self, rows: Sequence[BadRow]) -> None:
        new = [row for row in rows if (row.file, row.line) not in self._seen]
        self._seen |= {(row.file, row.line) for row in new}
        with (self._output_dir / FILE).open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, new)))
        for row in new:
            logger.warning("%s:%d: %s; padding without labels stands in its place", row.file, row.line, row.reason)
