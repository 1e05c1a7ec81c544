"""What the tests of the data pipeline share: a tiny checkpoint's processor, real pictures, synthesised videos, small files."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image
from torch import Tensor

from swiftcp.data.encode import RowEncoder
from swiftcp.models.qwen3_omni_moe.positions import OmniTokens, qwen3_omni_position_ids
from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids
from swiftcp.models.tiny import write_tiny


@functools.cache
def checkpoint(family: str = "qwen3_vl") -> Path:
    """The folder of a tiny model, written once a test process and deleted at its end."""
    folder = Path(tempfile.mkdtemp(prefix="swiftcp-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny(family, folder)
    return folder


@functools.cache
def processor(family: str = "qwen3_vl") -> Any:
    """The checkpoint's processor; shared, so never change it."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(checkpoint(family))


def encoder(**options: Any) -> RowEncoder:
    """Of the tiny checkpoint; `options` as `RowEncoder` takes them."""
    tokens = processor()
    position_ids = functools.partial(
        _positions, image_token_id=tokens.image_token_id, video_token_id=tokens.video_token_id, merge=tokens.image_processor.merge_size
    )
    return RowEncoder(tokens, position_ids, **options)


@functools.cache
def omni_tokens() -> OmniTokens:
    tokens = processor("qwen3_omni_moe")
    ids = tokens.tokenizer.convert_tokens_to_ids([tokens.image_token, tokens.video_token, tokens.audio_token])
    return OmniTokens(*ids, position_id_per_seconds=13, spatial_merge_size=tokens.image_processor.merge_size)


def omni_encoder(**options: Any) -> RowEncoder:
    """Of the tiny Qwen3-Omni; `options` as `RowEncoder` takes them."""
    return RowEncoder(processor("qwen3_omni_moe"), functools.partial(qwen3_omni_position_ids, tokens=omni_tokens()), **options)


def _positions(ids: Tensor, images: Tensor | None, videos: Tensor | None, _: Tensor | None, *, merge: int, **tokens: int) -> Tensor:
    return qwen3_vl_position_ids(ids, images, videos, spatial_merge_size=merge, **tokens)


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def picture(width: int, height: int) -> Image.Image:
    """A real photograph, resized."""
    from skimage import data

    return Image.fromarray(data.astronaut()).resize((width, height))


def write_video(path: Path, *, num_frames: int, size: tuple[int, int] = (64, 48), fps: int = 8) -> Path:
    """Frames of one grey each, brighter from frame to frame, as (width, height) `size`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(fps))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for index in range(num_frames):
            grey = np.full((size[1], size[0], 3), grey_of(index, num_frames), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def write_sound(path: Path, seconds: float, rate: int = 16_000, *, channels: int = 1) -> Path:
    """A tone that rises, the same in every channel."""
    times = np.arange(round(seconds * rate)) / rate
    tone = 0.5 * np.sin(2 * np.pi * (300 + 40 * times) * times)
    soundfile.write(path, np.repeat(tone[:, None], channels, axis=1), rate)
    return path


def write_heard_video(path: Path, *, num_frames: int, seconds: float, size: tuple[int, int] = (64, 48), fps: int = 8) -> Path:
    """A video with an audio track of about `seconds`, at 22,050 Hz in two channels."""
    rate = 22_050
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=Fraction(fps))
        video.width, video.height, video.pix_fmt = *size, "yuv420p"
        audio = container.add_stream("aac", rate=rate, layout="stereo")
        for index in range(num_frames):
            grey = np.full((size[1], size[0], 3), grey_of(index, num_frames), dtype=np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
        frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]).astype(np.float32), format="fltp", layout="stereo")
        frame.sample_rate = rate
        for stream, last in ((audio, frame), (audio, None), (video, None)):
            container.mux(stream.encode(last))
    return path


def turn_video(path: Path, target: Path, degrees: int) -> Path:
    """The same stream with a display rotation, as telephones write it."""
    with av.open(str(path)) as source, av.open(str(target), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return target


def grey_of(index: int, num_frames: int) -> int:
    return 16 + 220 * index // max(num_frames, 1)


def chat(user: Any, assistant: Any = "A picture.", **columns: Any) -> dict[str, Any]:
    """One row: a question and its answer."""
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}], **columns}
