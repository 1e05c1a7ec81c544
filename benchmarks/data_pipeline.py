"""Rows a second of the scan of lengths, of a second scan and of full encoding, against the checkpoint's processor called row by row.

    python benchmarks/data_pipeline.py [--model DIR] [--rows 40] [--workers 0]

Text rows, one JPEG of a megapixel each, and one video of ten seconds each (640 x 360, 25 frames a second), all with the limits of the
checkpoint (a tiny one by default, whose tokenizer and limits on pixels are small: give the folder of a real one for its figures).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import av
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from swiftcp.data.dataset import scan_rows
from swiftcp.data.encode import RowEncoder
from swiftcp.data.row_files import read_rows
from swiftcp.data.scan_cache import ScanCache
from swiftcp.models.registry import family_of
from swiftcp.models.tiny import write_tiny

SENTENCES = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every morning. " * 20


def write_data(folder: Path, kind: str, num_rows: int) -> Path:
    """A file of rows that differ from each other, and their media."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(num_rows):
        media: dict[str, Any] = {}
        if kind == "image":
            coarse = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((1152, 896), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
            media = {"images": [f"{number}.jpg"]}
        if kind == "video":
            write_video(folder / f"{number}.mp4", random)
            media = {"videos": [f"{number}.mp4"]}
        tag = f"<{kind}>" if media else ""
        question = f"{tag}{number}: what is it? {SENTENCES if not media else ''}"
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": SENTENCES[:300]}], **media})
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_video(path: Path, random: np.random.Generator) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        background = np.asarray(Image.fromarray(random.integers(0, 255, (18, 32, 3), dtype=np.uint8)).resize((640, 360)))
        for index in range(250):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(background, index, axis=1), format="rgb24")))
        container.mux(stream.encode(None))


def by_processor(processor: Any, path: Path) -> int:
    """`transformers` alone, row by row; it is given the frames of videos, which it samples."""
    num_rows = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        user, assistant = (message["content"] for message in row["messages"])
        parts: list[dict[str, Any]] = [{"type": "text", "text": user.removeprefix("<image>").removeprefix("<video>")}]
        parts = [{"type": "image", "image": str(path.parent / name)} for name in row.get("images", [])] + parts
        videos = [all_frames(path.parent / name) for name in row.get("videos", [])]
        parts = [{"type": "video", "video": frames} for frames in videos] + parts
        metadata = [{"total_num_frames": len(frames), "fps": 25.0} for frames in videos]
        options = {"processor_kwargs": {"videos_kwargs": {"video_metadata": metadata}}} if videos else {}
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": assistant}]}]
        processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **options)
        num_rows += 1
    return num_rows


def all_frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def rate(work: Callable[[], Any], num_rows: int) -> float:
    began = perf_counter()
    work()
    return num_rows / (perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or folder / "model"
        if options.model is None:
            write_tiny("qwen3_vl", model)
        config, processor = AutoConfig.from_pretrained(model), AutoProcessor.from_pretrained(model)
        encoder = RowEncoder(processor, partial(family_of(config.model_type).position_ids, config))
        print(f"{os.cpu_count()} cores, {options.workers} workers, rows a second:")
        print("| rows | processor | scan | scan / processor | scan with decoding | second scan | encode | encode / processor |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for kind, num_rows in (("text", 20 * options.rows), ("image", options.rows), ("video", max(4, options.rows // 8))):
            path = write_data(folder, kind, num_rows)
            rows = read_rows([path])
            encoder.encode(rows[0], 0)
            cache = partial(ScanCache, folder / "cache", [path], encoder.settings())
            scan = partial(scan_rows, rows, encoder, num_workers=options.workers)
            slow = rate(partial(by_processor, processor, path), num_rows)
            headers = rate(partial(scan, check_media=False), num_rows)
            decoding = rate(lambda scan=scan, cache=cache: scan(cache=cache()), num_rows)
            again = rate(lambda scan=scan, cache=cache: scan(cache=cache()), num_rows)
            encode = rate(lambda rows=rows: [encoder.encode(row, 0) for row in rows], num_rows)
            figures = [f"{slow:.1f}", f"{headers:.0f}", f"{headers / slow:.1f}", f"{decoding:.0f}", f"{again:.0f}", f"{encode:.1f}"]
            print(f"| {num_rows} {kind} | {' | '.join(figures)} | {encode / slow:.2f} |", flush=True)


if __name__ == "__main__":
    main()
