"""A small data file with sound: clips, and a video with a track of its own, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from tests.media_rows import conversation
from tests.unit.data_fixtures import write_heard_video, write_sound, write_video


def write_omni_rows(folder: Path) -> Path:
    """`rows.jsonl` beside its media; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sound(folder / "short.wav", 0.7)
    write_sound(folder / "longer.flac", 3.3, 44_100, channels=2)
    write_heard_video(folder / "heard.mp4", num_frames=16, seconds=2.2)
    write_video(folder / "mute.mp4", num_frames=16)
    Image.new("RGB", (96, 64), "orange").save(folder / "orange.png")
    rows = [
        conversation("Say hello.", "Hello, reader."),
        conversation("<audio>What do you hear?", "A tone that rises.", audios=["short.wav"]),
        conversation(
            "<audio>One. <image>Two. <audio>Three.", "Heard and seen.", audios=["longer.flac", "short.wav"], images=["orange.png"]
        ),
        conversation("<video>What happens?", "It grows brighter, with a tone.", videos=["heard.mp4"]) | {"use_audio_in_video": True},
        conversation("<audio>And <video>?", "It grows brighter.", audios=["longer.flac"], videos=["mute.mp4"]),
        conversation("<image>Which colour?", "Orange.", images=["orange.png"]),
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
