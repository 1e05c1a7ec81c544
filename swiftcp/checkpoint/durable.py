"""Files that are whole or absent after a crash: written aside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".incomplete"
"""Suffix of a folder that is being written, or being deleted. Whatever bears it may go."""


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    aside = path.with_name(path.name + UNFINISHED)
    aside.write_text(text, encoding="utf-8")
    flush(aside)
    aside.replace(path)
    flush(path.parent)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `final` at the end; after an error nothing of it is left."""
    aside = start_folder(final)
    try:
        yield aside
        publish_folder(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def aside_of(final: Path) -> Path:
    """Where a folder is filled before it gets its name."""
    return final.with_name(final.name + UNFINISHED)


def start_folder(final: Path) -> Path:
    """An empty folder beside `final`, to be filled and then published under its name."""
    aside = aside_of(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish_folder(aside: Path, final: Path) -> None:
    """Give a filled folder its name; its files are already flushed. What stood under the name before is deleted."""
    flush(aside)
    replaced = final.with_name(final.name + ".replaced" + UNFINISHED)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a crash leaves no half of it under its name."""
    aside = aside_of(folder)
    folder.rename(aside)
    flush(folder.parent)
    shutil.rmtree(aside)
