"""The quick start, in full, as a newcomer runs it; and its data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
LONGEST_TRAINING_SECONDS = 300


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_held_out_digits_are_not_trained(tmp_path: Path) -> None:
    subprocess.run([sys.executable, QUICKSTART / "prepare.py", tmp_path], check=True, timeout=120)
    train, test = (_rows(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    images = {name: {row["images"][0] for row in rows} for name, rows in {"train": train, "test": test}.items()}
    assert (len(images["train"]), len(images["test"])) == (len(train), len(test)) == (1497, 300)
    assert images["train"].isdisjoint(images["test"])
    assert {row["messages"][1]["content"] for row in test} == set("0123456789")
    assert all((tmp_path / image).is_file() for image in images["train"] | images["test"])
    pixels = {name: {(tmp_path / image).read_bytes() for image in names} for name, names in images.items()}
    assert pixels["train"].isdisjoint(pixels["test"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_start_reads_digits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, QUICKSTART / "run.py", tmp_path], check=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["rows"] == 300
    assert figures["accuracy"] >= 0.95
    assert figures["accuracy_images_swapped"] < 0.20
    last = _rows(tmp_path / "run" / "logging.jsonl")[-1]
    assert last["iteration"] == last["train_iters"]
    assert last["elapsed_seconds"] < LONGEST_TRAINING_SECONDS
