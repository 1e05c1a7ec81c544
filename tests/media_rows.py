"""A small data file of every modality, with pictures and a video made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

WIDTH, HEIGHT, NUM_FRAMES, FRAMES_PER_SECOND = 96, 64, 24, 8


def write_video(path: Path) -> None:
    """A bar that grows from the left while it changes its colour."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            pixels[:, : number * WIDTH // NUM_FRAMES] = [255, number * 10, 0]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def conversation(*turns: str, **media: list[str]) -> dict[str, Any]:
    """A row of turns by user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], **media}


def write_media_rows(folder: Path) -> Path:
    """`rows.jsonl` beside its media; returns its path."""
    from skimage import data

    Image.fromarray(data.astronaut()[:128, :160]).save(folder / "astronaut.png")
    Image.fromarray(data.coffee()[:96, :96]).save(folder / "coffee.png")
    Image.fromarray(data.chelsea()[:64, :200]).save(folder / "cat.jpg")
    write_video(folder / "bar.mp4")
    rows = [
        conversation("Say hello to the reader of this file.", "Hello, reader. How are you?"),
        conversation("<image>Who is this?", "A woman in a suit.", images=["astronaut.png"]),
        conversation(
            "<image>One. <image>Two.", "Coffee and a cat.", "<image>Now?", "A woman.", images=["coffee.png", "cat.jpg", "astronaut.png"]
        ),
        conversation("<video>What moves?", "A bar grows.", videos=["bar.mp4"]),
        conversation("<image>And <video>both?", "Both it is.", images=["coffee.png"], videos=["bar.mp4"]),
        conversation("x", "y"),
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
