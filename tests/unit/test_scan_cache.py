"""A second look at the same rows measures and decodes nothing; whatever changes a length, or a file, is looked at again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftcp.data.dataset import RowScan, scan_rows
from swiftcp.data.encode import RowEncoder
from swiftcp.data.media import check_image
from swiftcp.data.row_files import read_rows
from swiftcp.data.scan_cache import ScanCache, hashed
from swiftcp.data.visuals import MediaLimits

from .data_fixtures import chat, encoder, picture, write_jsonl, write_video


class Counted:
    """Scans a data set, and counts what is measured and decoded."""

    def __init__(self, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.folder = data, folder
        self.measured: list[int] = []
        self.decoded: list[str] = []
        measure = RowEncoder.measure
        monkeypatch.setattr(RowEncoder, "measure", lambda made, row: self.measured.append(row.line) or measure(made, row))
        monkeypatch.setattr("swiftcp.data.visuals.check_image", self._check_image)

    def _check_image(self, source: Any, folder: Path, access: Any) -> None:
        self.decoded.append(source)
        check_image(source, folder, access)

    def scan(self, *, check_media: bool = True, **options: Any) -> tuple[RowScan, list[int], list[str]]:
        """(what was found, lines measured, images decoded)"""
        self.measured.clear()
        self.decoded.clear()
        made = encoder(**options)
        found = scan_rows(read_rows([self.data]), made, check_media=check_media, cache=ScanCache(self.folder, [self.data], made.settings()))
        return found, list(self.measured), list(self.decoded)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    for name, size in (("a.png", (64, 64)), ("b.png", (96, 64))):
        picture(*size).save(tmp_path / name)
    write_video(tmp_path / "c.mp4", num_frames=8)
    rows = [
        chat("text alone"),
        chat("<image>", images=["a.png"]),
        chat("<image><image>", images=["a.png", "b.png"]),
        chat("<video>", videos=["c.mp4"]),
    ]
    return Counted(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "cache", monkeypatch)


def test_case_41_a_second_start_measures_and_decodes_nothing(counted: Counted) -> None:
    first, measured, decoded = counted.scan()
    assert measured == [1, 2, 3, 4] and decoded == ["a.png", "b.png"]
    again, measured, decoded = counted.scan()
    assert (measured, decoded) == ([], []) and again == first
    assert sum(file.stat().st_size for file in counted.folder.iterdir()) < 1000


def test_case_41_whatever_changes_a_length_is_looked_at(counted: Counted, tmp_path: Path) -> None:
    first, *_ = counted.scan()
    smaller, measured, decoded = counted.scan(limits=MediaLimits(image_max_token_num=4))
    assert measured == [1, 2, 3, 4] and decoded == [] and smaller.lengths[2] < first.lengths[2]
    assert counted.scan(mode="pt")[1] == [1, 2, 3, 4]
    picture(128, 64).save(tmp_path / "b.png")
    replaced, measured, decoded = counted.scan()
    assert (measured, decoded) == ([3], ["b.png"]) and replaced.lengths[2] > first.lengths[2]
    counted.data.write_text(counted.data.read_text().replace("text alone", "text alone, and then some more text"))
    changed, measured, decoded = counted.scan()
    assert (measured, decoded) == ([1], []) and changed.lengths[0] > first.lengths[0]


def test_case_41_a_file_of_the_same_size_and_time_is_another_one(counted: Counted, tmp_path: Path) -> None:
    counted.scan()
    path, found = tmp_path / "a.png", (tmp_path / "a.png").stat()
    contents = path.read_bytes()
    path.write_bytes(contents[:-20] + bytes(20))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_size == found.st_size
    assert "a.png" in counted.scan()[2]


def test_bad_rows_are_never_taken_from_the_cache(counted: Counted, tmp_path: Path) -> None:
    contents = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(contents[:-3000])
    first, *_ = counted.scan()
    again, *_ = counted.scan()
    assert [row.line for row in first.bad_rows] == [2, 3] and again == first
    (tmp_path / "a.png").write_bytes(contents)
    assert counted.scan()[0].bad_rows == ()


def test_headers_alone_leave_what_is_known_of_pixels(counted: Counted) -> None:
    counted.scan()
    assert counted.scan(check_media=False)[1:] == ([], [])
    assert counted.scan()[1:] == ([], [])


def test_damaged_or_unwritable_tables_are_made_anew(counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = counted.scan()
    for file in counted.folder.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert counted.scan()[0] == first and counted.scan()[1] == []
    counted.folder = tmp_path / "rows.jsonl" / "no_folder"
    assert counted.scan()[0] == first
    assert "the cache of lengths cannot be written" in caplog.text


def test_keys_end_in_no_zero() -> None:
    keys = [hashed(bytes([number])) for number in range(200)]
    assert all(np.bytes_(key) == key and len(key) == 16 for key in keys) and len(set(keys)) == 200
    assert hashed(b"ab", b"c") != hashed(b"a", b"bc")
