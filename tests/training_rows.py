"""Data files for training the tiny model: short conversations, some with pictures, the same each time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "near", "river", "while", "sun", "sets")


def conversation(number: int, folder: Path) -> dict[str, Any]:
    """A question of 3 to 30 words with 0 to 2 pictures, and an answer of 1 to 12 words."""
    draw = random.Random(number)
    images = []
    for index in range(draw.choice([0, 0, 1, 1, 2])):
        shape = (draw.choice([32, 64, 96]), draw.choice([32, 64]), 3)
        pixels = np.random.default_rng([number, index]).integers(0, 255, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}-{index}.png")
        images.append(f"{number}-{index}.png")
    question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(*count))) for count in ((3, 30), (1, 12)))
    messages = [{"role": "user", "content": "<image>" * len(images) + question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


def write_rows(folder: Path, num_rows: int, *, name: str = "rows.jsonl", first: int = 0) -> Path:
    """A file of the conversations `first` to `first + num_rows - 1`, beside its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [conversation(number, folder) for number in range(first, first + num_rows)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name
