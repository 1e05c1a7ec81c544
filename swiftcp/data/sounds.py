"""A row's sounds through the checkpoint's own feature extractor: how many frames from lengths, log-mel features from samples.

The clips of a row go through the extractor together, as the checkpoint's processor sends them, and nothing is cut at 30 seconds
or padded to them, which the extractor of Whisper does unless it is told not to.

Legend: A sounds (audio clips, and the tracks of videos that are heard), N samples, F frames, M mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swiftcp.data.audio_files import num_samples, read_audio
from swiftcp.data.media import MediaAccess, MediaError, label
from swiftcp.data.rows import AudioPart, ImagePart, MediaPart, Row, VideoPart
from swiftcp.errors import DataError


class Sounds:
    """One checkpoint's feature extractor, and where media may come from."""

    def __init__(self, processor: Any, access: MediaAccess) -> None:
        self._extractor: Any = getattr(processor, "feature_extractor", None)
        self._access = access

    def lengths(self, row: Row) -> list[int]:
        """Samples of each sound, at the extractor's rate; headers are enough for most formats.

        Raises:
            MediaError: a file cannot be read, has no track, or is too short to be heard.
            DataError: the checkpoint hears nothing.
        """
        lengths = [
            num_samples(self._source(part), row.file.parent, self._access, self._extractor.sampling_rate) for part in self._heard(row)
        ]
        self._check(row, lengths)
        return lengths

    def read(self, row: Row) -> list[np.ndarray]:
        """Each sound, [N] float32 at the extractor's rate. Raises MediaError as `lengths` does."""
        clips = [read_audio(self._source(part), row.file.parent, self._access, self._extractor.sampling_rate) for part in self._heard(row)]
        self._check(row, [clip.size for clip in clips])
        return clips

    def check(self, parts: Sequence[MediaPart], row: Row) -> None:
        """Decode those of the row's media that are heard. Raises MediaError as `lengths` does."""
        for part in parts:
            if part in row.sounds and not isinstance(part, ImagePart):
                read_audio(self._source(part), row.file.parent, self._access, self._extractor.sampling_rate)

    def num_frames(self, lengths: Sequence[int]) -> Tensor:
        """[A] int64 frames of clips of these lengths in samples: the extractor drops the last frame of its longest clip alone."""
        hop = self._extractor.hop_length if lengths else 1
        most = max(lengths, default=0) // hop
        return torch.tensor([min(-(-length // hop), most) for length in lengths], dtype=torch.int64)

    def features(self, clips: Sequence[np.ndarray]) -> Tensor:
        """[F, M] float32: the frames of all clips, one after the other."""
        done = self._extractor(
            list(clips),
            sampling_rate=self._extractor.sampling_rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask_AF = done["attention_mask"].bool()
        assert torch.equal(mask_AF.sum(1), self.num_frames([clip.size for clip in clips]))
        return done["input_features"].transpose(1, 2)[mask_AF].contiguous()

    def _heard(self, row: Row) -> tuple[AudioPart | VideoPart, ...]:
        if row.sounds and self._extractor is None:
            raise DataError("the row has sound, which the checkpoint cannot hear: remove audios and use_audio_in_video")
        return row.sounds

    def _source(self, part: AudioPart | VideoPart) -> str | bytes:
        if isinstance(part.source, tuple):
            raise MediaError(
                f"video of {len(part.source)} listed frames has no audio track: give a file, or set use_audio_in_video to false"
            )
        return part.source

    def _check(self, row: Row, lengths: Sequence[int]) -> None:
        shortest = self._extractor.n_fft if lengths else 0
        for part, length in zip(row.sounds, lengths, strict=True):
            if length < shortest:
                raise MediaError(
                    f"{part.kind} {label(self._source(part))} has {length} samples of sound at {self._extractor.sampling_rate} Hz,"
                    f" of which at least {shortest} are needed: remove it, or use a longer one"
                )
