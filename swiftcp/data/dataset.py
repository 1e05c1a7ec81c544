"""A data set that is ready to train on: every row was looked at before, bad ones are refused or left out, and all lengths are known.

One rank scans (`scan_rows`, which raises nothing about rows) and hands the result to the others; `load_dataset` with that result then
gives the same data set, or raises the same error, on all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swiftcp.data.batch import Sample
from swiftcp.data.encode import RowEncoder
from swiftcp.data.row_files import Rows, read_rows
from swiftcp.data.rows import BadRow, Row, RowError
from swiftcp.data.scan_cache import ScanCache, media_key
from swiftcp.data.workers import map_in_order
from swiftcp.errors import DataError

logger = logging.getLogger(__name__)

MAX_BAD_SHARE = 0.5
"""Without `strict`, more bad rows than this share are an error still: then the data set is not what it is taken for."""
_NUM_SHOWN = 20
_FEW_ROWS = 512
"""Fewer rows are looked at faster than worker processes start."""


@dataclass(frozen=True)
class RowScan:
    """What a look at every row found. Small enough to send to other ranks."""

    kept: tuple[int, ...]
    """Indices of the good rows."""
    lengths: tuple[int, ...]
    """Tokens of each good row."""
    labels: tuple[int, ...]
    """Labelled tokens of each."""
    bad_rows: tuple[BadRow, ...]
    deleted_rows: tuple[BadRow, ...]
    """Good rows above `max_length`, where `truncation_strategy` deletes them, or would have to cut media."""
    longest: int
    """Tokens of the longest row, deleted ones too."""
    digest: str
    """SHA-256 of what the good rows say, wherever their files lie: other data of the same lengths are told apart by it."""


def scan_rows(
    rows: Rows,
    encoder: RowEncoder,
    *,
    check_media: bool = True,
    num_workers: int = 0,
    cache: ScanCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RowScan:
    """Parse and measure every row.

    Args:
        check_media: decode every medium too, so that broken files are found now; headers alone are read otherwise.
        cache: what earlier scans found; what this one finds is put into it.
        progress: called with (rows done, rows in all).
    """
    measure = _Measure(rows, encoder, check_media, cache)
    known: dict[bytes, tuple[int, int]] = {}
    decoded: set[bytes] = set()
    kept, lengths, labels = [], [], []
    bad: list[BadRow] = []
    deleted: list[BadRow] = []
    longest, digest = 0, hashlib.sha256()
    if len(rows) < _FEW_ROWS:
        num_workers = 0
    measured = map_in_order(measure, range(len(rows)), num_workers=num_workers, prefetch_factor=16)
    for index, (found, length, num_labels, row_digest, key, media_keys) in enumerate(measured):
        longest = max(longest, length)
        decoded.update(media_keys)
        if key is not None:
            known[key] = length, num_labels
        if found is None:
            kept.append(index)
            lengths.append(length)
            labels.append(num_labels)
            digest.update(row_digest)
        else:
            (deleted if found.kind == "length" and encoder.truncation_strategy != "raise" else bad).append(found)
        if progress is not None:
            progress(index + 1, len(rows))
    if cache is not None:
        cache.save(known, decoded)
    return RowScan(tuple(kept), tuple(lengths), tuple(labels), tuple(bad), tuple(deleted), longest, digest.hexdigest())


class _Measured(NamedTuple):
    """What a look at one row found; 0 for what is unknown."""

    found: BadRow | None
    """What is wrong with it."""
    length: int
    num_labels: int
    digest: bytes
    key: bytes | None
    """Of the row in the cache; None where its contents cannot be told, or it could not be measured."""
    decoded: tuple[bytes, ...]
    """Keys of its media that were decoded, now or earlier."""


class _Measure:
    """Looks at the row at an index."""

    def __init__(self, rows: Rows, encoder: RowEncoder, check_media: bool, cache: ScanCache | None) -> None:
        self._rows, self._encoder, self._check_media, self._cache = rows, encoder, check_media, cache
        self._decoded: set[bytes] = set()
        """By this process in this scan: many rows may name one medium."""

    def __call__(self, index: int) -> _Measured:
        length, num_labels, limit = 0, 0, self._encoder.max_length
        key: bytes | None = None
        media_keys: tuple[bytes, ...] = ()
        try:
            row = self._rows[index]
            digest = _digest(row)
            keys = [media_key(part, row, self._encoder.access) for part in row.media]
            whole = [known for known in keys if known is not None]
            row_key = None if self._cache is None or None in keys else self._cache.row_key(digest, whole)
            found = None if row_key is None or self._cache is None else self._cache.find(row_key)
            length, num_labels = found or self._encoder.measure(row)
            key = row_key
            if limit is not None and length > limit:
                raise row.error(f"the row has {length} tokens, max_length is {limit}: raise it, or shorten or delete the row", "length")
            if self._check_media:
                self._encoder.check_media(row, [part for part, own in zip(row.media, keys, strict=True) if not self._was_decoded(own)])
                self._decoded.update(whole)
            media_keys = tuple(own for own in whole if self._was_decoded(own))
        except RowError as error:
            return _Measured(BadRow(str(error.file), error.line, error.reason, error.kind), length, num_labels, b"", key, ())
        return _Measured(None, length, num_labels, digest, key, media_keys)

    def _was_decoded(self, key: bytes | None) -> bool:
        return key is not None and (key in self._decoded or (self._cache is not None and self._cache.was_decoded(key)))


def _digest(row: Row) -> bytes:
    """Of the row's conversation, with the names of its media, and their bytes where it holds them."""
    more = [*([True] if row.use_audio_in_video else []), *([asdict(row.objects)] if row.objects is not None else [])]
    contents = [asdict(message) for message in row.messages], row.tools, *more
    return hashlib.sha256(json.dumps(contents, default=_plain).encode()).digest()


def _plain(value: Any) -> str:
    """What JSON cannot hold: a medium's bytes, or dates from Parquet."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


class EncodedDataset:
    """Good rows as samples. Places run from 0 on; a sample's `row` is its index among all rows that were read."""

    def __init__(self, rows: Rows, encoder: RowEncoder, scan: RowScan, *, strict: bool = True) -> None:
        self.rows = rows
        self.strict = strict
        self.encoder = encoder
        self.kept = scan.kept
        self.lengths = scan.lengths
        self.labels = scan.labels
        self.digest = scan.digest
        self.dropped: tuple[BadRow, ...] = (*scan.bad_rows, *scan.deleted_rows)
        """For bad_rows.jsonl."""

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, place: int) -> Sample:
        """Raises RowError where the row, or its media, are not what they were when they were scanned."""
        index = self.kept[place]
        row = self.rows[index]
        sample = self.encoder.encode(row, index)
        if len(sample) != self.lengths[place]:
            raise row.error(
                f"the row has {len(sample)} tokens, but had {self.lengths[place]} at the start: do not change data during a run"
            )
        return sample

    def sample(self, place: int, bad: Mapping[int, BadRow]) -> Sample:
        """As the data set's item; without `strict`, padding of the row's length where its media cannot be decoded.

        Args:
            bad: rows, by index, that could not be decoded on this rank or another: they are padding too.
        """
        index = self.kept[place]
        if index in bad:
            return self.encoder.padding(self.lengths[place], index, bad[index])
        try:
            return self[place]
        except RowError as error:
            if self.strict or error.kind != "media":
                raise
            return self.encoder.padding(self.lengths[place], index, BadRow(str(error.file), error.line, error.reason, "decode"))

    def require_trained(self, key: str) -> None:
        """Raises: DataError: no row of the data set, which the recipe names under `key`, has a trained token."""
        if not any(self.encoder.is_trained(self.rows[index]) for index in self.kept):
            raise DataError(f"{key}: none of {len(self)} rows has a trained token: give a turn `loss` true and a `weight` above 0")

    def split(self, ratio: float, seed: int) -> tuple[EncodedDataset, EncodedDataset]:
        """(the rest, a share of `ratio` of the rows), both in the rows' order; at least one row each.

        Raises:
            DataError: there are fewer than two rows.
        """
        if len(self) < 2:
            raise DataError(f"a data set of {len(self)} rows cannot be split: give a val_dataset")
        order = list(range(len(self)))
        random.Random(f"split {seed}").shuffle(order)
        count = min(len(self) - 1, max(1, round(ratio * len(self))))
        return self._select(sorted(order[count:])), self._select(sorted(order[:count]))

    def _select(self, places: Iterable[int]) -> EncodedDataset:
        places = tuple(places)
        kept, lengths, labels = (tuple(values[i] for i in places) for values in (self.kept, self.lengths, self.labels))
        scan = RowScan(kept, lengths, labels, self.dropped, (), 0, self.digest)
        return EncodedDataset(self.rows, self.encoder, scan, strict=self.strict)


def load_dataset(
    datasets: Sequence[str | Path],
    encoder: RowEncoder,
    *,
    strict: bool = True,
    scan: RowScan | None = None,
    check_media: bool = True,
    num_workers: int = 0,
    reports: bool = True,
) -> EncodedDataset:
    """Open data sets and look at every row.

    Args:
        strict: a bad row is an error; otherwise it is left out, counted and listed in the result's `dropped`.
        scan: what another rank found in the same data sets; nothing is scanned then.
        reports: warn of what is left out or cut; one rank is enough.

    Raises:
        DataError: a data set cannot be read, rows are bad, or none is left.
    """
    rows = read_rows(datasets)
    if scan is None:
        scan = scan_rows(rows, encoder, check_media=check_media, num_workers=num_workers)
    _check(scan, strict=strict, max_length=encoder.max_length)
    if reports:
        _warn_of_omitted(scan, encoder)
    return EncodedDataset(rows, encoder, scan, strict=strict)


def _check(scan: RowScan, *, strict: bool, max_length: int | None) -> None:
    """Raises: DataError: rows are bad, or none is left."""
    bad, num_rows = scan.bad_rows, len(scan.kept) + len(scan.bad_rows) + len(scan.deleted_rows)
    if bad and (strict or len(bad) > MAX_BAD_SHARE * num_rows):
        raise DataError(_report(bad, num_rows, strict))
    if not scan.kept:
        raise DataError(f"none of {num_rows} rows is left: the longest has {scan.longest} tokens, max_length is {max_length}")


def _warn_of_omitted(scan: RowScan, encoder: RowEncoder) -> None:
    """Warn of rows that are left out or cut."""
    bad, num_rows = scan.bad_rows, len(scan.kept) + len(scan.bad_rows) + len(scan.deleted_rows)
    if bad:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(Counter(row.kind for row in bad).items()))
        logger.warning("%d of %d rows are bad and left out (%s); see bad_rows.jsonl", len(bad), num_rows, kinds)
    if scan.deleted_rows:
        logger.warning(
            "%d of %d rows are longer than max_length %s and deleted; the longest has %d tokens",
            len(scan.deleted_rows),
            num_rows,
            encoder.max_length,
            scan.longest,
        )
    if encoder.truncation_strategy in ("left", "right") and (num_cut := sum(length == encoder.max_length for length in scan.lengths)):
        logger.warning(
            "%d of %d rows have max_length %s: what they had beyond it is cut off (truncation_strategy %s)",
            num_cut,
            len(scan.lengths),
            encoder.max_length,
            encoder.truncation_strategy,
        )


def _report(bad: Sequence[BadRow], num_rows: int, strict: bool) -> str:
    remedy = "mend them, or set strict to false to leave them out" if strict else f"more than {MAX_BAD_SHARE:.0%}, even without strict"
    lines = [f"{row.file}:{row.line}: {row.reason}" for row in bad[:_NUM_SHOWN]]
    if len(bad) > _NUM_SHOWN:
        lines.append(f"... and {len(bad) - _NUM_SHOWN} more")
    return "\n  ".join([f"{len(bad)} of {num_rows} rows are bad ({remedy}):", *lines])
