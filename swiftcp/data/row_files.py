"""Files of rows: `.jsonl`, `.json`, `.csv`, `.parquet`, folders of those, and data sets of the Hub, as one lazy sequence of rows.

Rows are parsed when they are asked for, and never through one schema, so that a column of mixed types is no error. JSON lines are
found by their byte offsets and Parquet files are memory-mapped: a data set costs little memory, and little to send to a worker.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from swiftcp.config.paths import is_hub_name, missing, split_row_limit
from swiftcp.data.arrow_rows import open_hub, open_parquet, open_saved
from swiftcp.data.rows import Row, RowError, parse_row
from swiftcp.errors import DataError

_BETWEEN_ITEMS = re.compile(r"[ \t\r\n,]*")


class RowFile(Protocol):
    path: Path

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[int, Any]:
        """(1-based line, raw row) of the 0-based row."""
        ...


class Rows(Sequence[Row]):
    """The rows of several data sets, one after the other. Asking for a row raises `RowError` where it is wrong."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self._files = [file for file in files if len(file)]
        self._ends = list(itertools.accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, index)
        file = self._files[which]
        line, raw = file.read(index - (self._ends[which] - len(file)))
        return parse_row(raw, file.path, line)


def read_rows(datasets: Sequence[str | Path]) -> Rows:
    """Open data sets: files or folders, each with an optional `#N` behind it that takes the first N rows.

    Raises:
        DataError: a path is missing, of an unknown kind, or holds too few rows.
    """
    rows = Rows([file for dataset in datasets for file in _open_dataset(str(dataset))])
    if not len(rows):
        raise DataError(f"dataset {', '.join(map(str, datasets)) or '(none)'} holds no rows")
    return rows


def _open_dataset(dataset: str) -> list[RowFile]:
    path, count = split_row_limit(dataset)
    files = _open_files(path)
    return files if count is None else _first_rows(files, count, dataset)


def _open_files(path: Path) -> list[RowFile]:
    if is_hub_name(str(path)):
        return [open_hub(path)]
    if path.is_dir() and (saved := open_saved(path)) is not None:
        return [saved]
    return [_open_file(file) for file in _find_files(path)]


def _find_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(missing("dataset", path))
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _READERS and file.name != "dataset_infos.json")
    if not files:
        raise DataError(f"folder {path} holds no data set: expected files ending in {', '.join(_READERS)}")
    return files


def _open_file(path: Path) -> RowFile:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"dataset {path} ends in '{path.suffix}': expected one of {', '.join(_READERS)}")
    return reader(path)


def _first_rows(files: Sequence[RowFile], count: int, dataset: str) -> list[RowFile]:
    total = sum(len(file) for file in files)
    if count > total:
        raise DataError(f"dataset {dataset} holds only {total} rows: ask for at most that many")
    taken: list[RowFile] = []
    for file in files:
        taken.append(_FirstRows(file, min(count, len(file))))
        count -= len(taken[-1])
    return taken


class _FirstRows:
    def __init__(self, file: RowFile, count: int) -> None:
        self.path = file.path
        self._file, self._count = file, count

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[int, Any]:
        return self._file.read(index)


class JsonLines:
    """One JSON object a line; empty lines are skipped, and counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = [(line, offset) for line, offset, text in self._scan() if text.strip(b" \t\r\n\xef\xbb\xbf")]
        self._lines = np.array([line for line, _ in found], dtype=np.int64)
        self._offsets = np.array([offset for _, offset in found], dtype=np.int64)

    def _scan(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        with self.path.open("rb") as file:
            for line, text in enumerate(file, start=1):
                yield line, offset, text
                offset += len(text)

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> tuple[int, Any]:
        line = int(self._lines[index])
        with self.path.open("rb") as file:
            file.seek(int(self._offsets[index]))
            text = file.readline()
        try:
            return line, json.loads(text.decode("utf-8-sig"))
        except ValueError as error:  # not UTF-8 is one too
            raise RowError(self.path, line, f"the line is no JSON ({error}): write one object a line") from None


class _Table:
    """Rows in memory, each with its line."""

    def __init__(self, path: Path, rows: list[tuple[int, Any]]) -> None:
        self.path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> tuple[int, Any]:
        return self._rows[index]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): convert it") from None


def _open_json(path: Path) -> RowFile:
    """A list of objects; a file that begins otherwise holds one object a line."""
    text = _read_text(path)
    return _Table(path, list(_json_items(path, text))) if text.lstrip().startswith("[") else JsonLines(path)


def _json_items(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each item of a JSON list, with the line on which it begins."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(path, error.lineno, f"the list of rows breaks here: {error.msg}") from None
    decoder = json.JSONDecoder()
    line, counted, end = 1, 0, text.index("[") + 1
    while (begin := _next_item(text, end)) is not None:
        line += text.count("\n", counted, begin)
        counted = begin
        value, end = decoder.raw_decode(text, begin)
        yield line, value


def _next_item(text: str, position: int) -> int | None:
    """Where the next item of a valid JSON list begins, or None at the list's end."""
    between = _BETWEEN_ITEMS.match(text, position)
    assert between is not None
    return None if text[between.end()] == "]" else between.end()


def _open_csv(path: Path) -> RowFile:
    """Cells are strings; lists and objects in them are JSON; empty ones count as absent."""
    rows = []
    limit = csv.field_size_limit(sys.maxsize)  # a cell may hold a long document; the limit belongs to the process
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            line = 2
            for cells in reader:
                rows.append((line, {name: cell for name, cell in cells.items() if cell not in (None, "")}))
                if None in cells:
                    raise RowError(path, line, f"the row has more cells than the {len(reader.fieldnames or [])} columns: quote commas")
                line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return _Table(path, rows)


_READERS = {".jsonl": JsonLines, ".json": _open_json, ".csv": _open_csv, ".parquet": open_parquet}
