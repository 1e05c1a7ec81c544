"""Read the held-out digits with `transformers` alone: how many answers are right, and how many with the images swapped.

    python examples/quickstart/evaluate.py MODEL_FOLDER ROWS.jsonl [FIGURES.json]

A model that looks at the images is right about one time in ten when it is shown another row's image.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from transformers.utils import logging

BATCH_SIZE = 50
MAX_NEW_TOKENS = 4
SEED = 0


def evaluate(model_folder: Path, rows_file: Path) -> dict[str, float]:
    """Fractions of greedy answers that equal the row's: with its own image, and with the images of all rows permuted."""
    logging.disable_progress_bar()
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    images = [Image.open(rows_file.parent / row["images"][0]).convert("RGB") for row in rows]
    swapped = [images[i] for i in np.random.default_rng(SEED).permutation(len(images))]
    expected = [row["messages"][-1]["content"] for row in rows]
    return {
        "rows": len(rows),
        "accuracy": _accuracy(_answers(model, processor, rows, images), expected),
        "accuracy_images_swapped": _accuracy(_answers(model, processor, rows, swapped), expected),
    }


def _accuracy(answers: list[str], expected: list[str]) -> float:
    return sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True)) / len(expected)


def _answers(model: Any, processor: Any, rows: list[dict], images: list[Image.Image]) -> list[str]:
    answers = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        prompts = [_prompt(processor, row) for row in rows[batch]]
        inputs = processor(text=prompts, images=images[batch], padding=True, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def _prompt(processor: Any, row: dict) -> str:
    """The question as the checkpoint's own chat template writes it, up to where the answer begins."""
    question = row["messages"][0]["content"].removeprefix("<image>")
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


if __name__ == "__main__":
    figures = evaluate(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(figures))
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(json.dumps(figures), encoding="utf-8")
