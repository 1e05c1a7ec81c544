"""Turn the 1,797 handwritten digits that ship with scikit-learn into PNG files and rows.

    python examples/quickstart/prepare.py FOLDER

FOLDER then holds train.jsonl (1,497 rows), test.jsonl (300 held-out rows) and digits/0000.png to digits/1796.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NUM_HELD_OUT = 300
SEED = 0
QUESTION = "<image>What digit is this?"


def write_digits(folder: Path) -> None:
    """Write all images, and the rows of a fixed, disjoint split."""
    digits = load_digits()
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    for index, pixels in enumerate(digits.images):
        Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(folder / _image_name(index))
    order = np.random.default_rng(SEED).permutation(len(digits.images))
    for name, indices in {"test": order[:NUM_HELD_OUT], "train": order[NUM_HELD_OUT:]}.items():
        lines = [json.dumps(_row(index, digits.target[index])) + "\n" for index in indices]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _image_name(index: int) -> str:
    return f"digits/{index:04}.png"


def _row(index: int, digit: int) -> dict[str, list]:
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": str(digit)}]
    return {"messages": messages, "images": [_image_name(index)]}


if __name__ == "__main__":
    write_digits(Path(sys.argv[1]))
