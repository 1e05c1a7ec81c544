"""What earlier looks at the same rows found, so that a run which starts again neither measures nor decodes them again.

Two sorted tables a data set: lengths by all that decides a row's length (its contents, the state of its files, tokenizer, template,
limits, code), and media that were decoded to their last byte by the state of their file. Neither holds pixels nor text: 24 and 16
bytes an entry, and no entry outlives a look at the rows that did not meet it. One process writes, aside and then renamed; whoever
reads meanwhile, on whatever machine, sees the old table or the new one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from swiftcp.data.media import MediaAccess, MediaError, resolve
from swiftcp.data.rows import MediaPart, Row, VideoPart

logger = logging.getLogger(__name__)

_KEY_BYTES = 16
_ROWS = np.dtype([("key", f"S{_KEY_BYTES}"), ("length", "<u4"), ("labels", "<u4")])
_MEDIA = np.dtype([("key", f"S{_KEY_BYTES}")])


def cache_folder() -> Path:
    """SWIFTCP_CACHE, or swiftcp/ in the user's folder of caches."""
    if given := os.environ.get("SWIFTCP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftcp"


def hashed(*parts: bytes) -> bytes:
    """A key of these parts, which ends in no zero byte: numpy would cut it."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()[:-1] + b"k"


def media_key(part: MediaPart, row: Row, access: MediaAccess) -> bytes | None:
    """Changes with the contents of the medium; None where they cannot be told without reading it, as of a URL or a missing file."""
    sources = part.source if isinstance(part.source, tuple) else (part.source,)
    states = []
    for source in sources:
        if isinstance(source, str) and source.lower().startswith(("http:", "https:")):
            return None
        try:
            where = resolve(source, row.file.parent, access)
            if isinstance(where, bytes):
                states.append(where)
            else:
                found = where.stat()
                states.append(repr((str(where), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)).encode())
        except (MediaError, OSError):
            return None
    heard = row.use_audio_in_video and isinstance(part, VideoPart)
    return hashed(part.kind.encode(), bytes([heard]), *states)


class ScanCache:
    """The tables of one list of data sets under one set of settings. It can be sent to worker processes."""

    def __init__(self, folder: Path, datasets: Sequence[str | Path], settings: bytes) -> None:
        """
        Args:
            settings: digest of all but the rows that decides their lengths.
        """
        names = hashed(*(str(Path(dataset).absolute()).encode() for dataset in datasets))
        self.settings = settings
        self._rows_file = folder / f"rows-{hashed(names, settings).hex()}.npy"
        self._media_file = folder / f"media-{names.hex()}.npy"
        self._rows, self._media = _read(self._rows_file, _ROWS), _read(self._media_file, _MEDIA)

    def row_key(self, digest: bytes, media_keys: Iterable[bytes]) -> bytes:
        return hashed(self.settings, digest, *media_keys)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """(tokens, labelled tokens) of a row."""
        place = _place(self._rows, key)
        return None if place is None else (int(self._rows["length"][place]), int(self._rows["labels"][place]))

    def was_decoded(self, key: bytes) -> bool:
        """Whether a medium was decoded to its last byte."""
        return _place(self._media, key) is not None

    def save(self, rows: Mapping[bytes, tuple[int, int]], media: Iterable[bytes]) -> None:
        """Put what this look met in the place of what earlier ones did. Where nothing can be written, the next start is as slow."""
        try:
            _write(self._rows_file, np.array([(key, *figures) for key, figures in rows.items()], dtype=_ROWS))
            _write(self._media_file, np.array([(key,) for key in media], dtype=_MEDIA))
        except OSError as error:
            logger.warning("the cache of lengths cannot be written (%s): set SWIFTCP_CACHE to a folder that can", error)


def _place(table: np.ndarray, key: bytes) -> int | None:
    place = int(np.searchsorted(table["key"], np.bytes_(key)))
    return place if place < len(table) and table["key"][place] == key else None


def _read(path: Path, dtype: np.dtype) -> np.ndarray:
    """The table, or an empty one where it is missing or damaged: then it is made anew."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.empty(0, dtype)
    return table if table.dtype == dtype and table.ndim == 1 else np.empty(0, dtype)


def _write(path: Path, table: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    with aside.open("wb") as file:
        np.save(file, np.sort(table, order="key"))
    aside.replace(path)
