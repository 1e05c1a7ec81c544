"""Rows that `datasets` holds as memory-mapped Arrow tables: Parquet files, folders that it saved, and data sets of the Hub.

What Arrow filled with nulls is absent from a row, and media columns stay bytes and paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swiftcp.errors import DataError

_SPLIT = "train"
"""Of a data set of several splits, the one that is read."""


class ArrowRows:
    """The rows of one split."""

    def __init__(self, path: Path, rows: Any) -> None:
        self.path = path
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> tuple[int, Any]:
        """(1-based position, raw row)"""
        return index + 1, _without_nulls(self._rows[index].to_pylist()[0])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Every rank opens the file: their bars would run into each other."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def _opened(path: Path, what: str, read: Callable[[], Any]) -> ArrowRows:
    """What `datasets` reads, or an error that says what could not be read."""
    import datasets
    from pyarrow import ArrowException

    try:
        with _no_progress_bars():
            rows = read()
    except (ArrowException, datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{what}: {error.__cause__ or error}") from None
    if isinstance(rows, datasets.DatasetDict):
        if _SPLIT not in rows:
            raise DataError(f"{path} has the splits {', '.join(rows)}, of which none is {_SPLIT}: save the one to train on alone")
        rows = rows[_SPLIT]
    return ArrowRows(path, rows)


def open_parquet(path: Path) -> ArrowRows:
    """Raises: DataError: it is no Parquet file."""
    import datasets

    return _opened(path, f"{path} cannot be read as Parquet", lambda: datasets.Dataset.from_parquet(str(path)))


def open_saved(folder: Path) -> ArrowRows | None:
    """A folder that `datasets` wrote by `save_to_disk`; None for others.

    Raises:
        DataError: it is damaged, or has several splits and none to train on.
    """
    if not (folder / "dataset_dict.json").is_file() and not all((folder / name).is_file() for name in ("state.json", "dataset_info.json")):
        return None
    import datasets

    return _opened(folder, f"folder {folder} cannot be read by datasets", lambda: datasets.load_from_disk(str(folder)))


def open_hub(path: Path) -> ArrowRows:
    """The split `train` of a data set of the Hub; offline (HF_HUB_OFFLINE=1) from the local cache.

    Raises:
        DataError: there is no such data set, or it cannot be had.
    """
    import datasets

    name, _, subset = str(path).partition(":")
    what = f"dataset {path} is no path here, and datasets cannot load it from the Hub or its local cache"
    return _opened(path, what, lambda: datasets.load_dataset(name, subset or None, split=_SPLIT))
