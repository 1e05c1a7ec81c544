"""Sound from whatever a row names, at the rate that a model hears: soundfile where it is installed and knows the format, else PyAV.

Clips are mono float32, the mean of their channels, never cut. A clip of n samples at one rate has ceil(n * to / from) at another,
whichever library resamples it, so that lengths can be told from headers.

Legend: N samples, C channels.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np

from swiftcp.data.media import MediaAccess, MediaError, label, open_container, resolve, within
from swiftcp.data.rows import MediaSource

logger = logging.getLogger(__name__)

_EXACT_HEADERS = {"WAV", "WAVEX", "FLAC", "AIFF", "AU", "CAF", "RF64", "W64"}
"""Formats of soundfile whose headers count samples; those of others estimate."""


def _optional(name: str) -> Any:
    """A library of the extra `audio`, or None."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # OSError: the package is there, and the C library that it loads is not
        return None


def num_samples(source: MediaSource, folder: Path, access: MediaAccess, rate: int) -> int:
    """Samples of a clip at `rate`; from the header where it is exact, else by decoding.

    Raises:
        MediaError: the file cannot be read, or holds no sound.
    """
    soundfile = _optional("soundfile")
    where = resolve(source, folder, access)
    if soundfile is not None:
        try:
            info = soundfile.info(BytesIO(where) if isinstance(where, bytes) else str(where))
        except (soundfile.SoundFileError, RuntimeError):
            info = None
        if info is not None and info.format in _EXACT_HEADERS:
            return _resampled_length(info.frames, info.samplerate, rate)
    return read_audio(source, folder, access, rate).size


def read_audio(source: MediaSource, folder: Path, access: MediaAccess, rate: int) -> np.ndarray:
    """The sound of an audio or a video file, [N] float32 at `rate`.

    Raises:
        MediaError: the file cannot be read, or has no sound.
    """
    return within(access.timeout, f"audio {label(source)}", lambda: _read_audio(source, resolve(source, folder, access), rate))


def _read_audio(source: MediaSource, where: Path | bytes, rate: int) -> np.ndarray:
    decoded = _read_by_soundfile(where)
    with _naming(source):
        samples_CN, original = decoded if decoded is not None else _read_by_av(where, source)
        mono_N = samples_CN.mean(axis=0, dtype=np.float32)
        if not np.isfinite(mono_N).all():
            raise MediaError(f"audio {label(source)} holds values that are no numbers: encode it again")
        return _resample(mono_N, original, rate)


@contextmanager
def _naming(source: MediaSource) -> Iterator[None]:
    try:
        yield
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, OSError) as error:
        raise MediaError(f"audio {label(source)} cannot be read ({error or type(error).__name__}): replace the file") from None


def _read_by_soundfile(where: Path | bytes) -> tuple[np.ndarray, int] | None:
    """([C, N] float32, rate), or None where soundfile is not installed or does not know the format."""
    soundfile = _optional("soundfile")
    if soundfile is None:
        return None
    try:
        samples_NC, rate = soundfile.read(BytesIO(where) if isinstance(where, bytes) else str(where), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError):
        return None
    return samples_NC.T, rate


def _read_by_av(where: Path | bytes, source: MediaSource) -> tuple[np.ndarray, int]:
    """([C, N] float32, rate) of the first audio stream."""
    container: Any
    with open_container(where) as container:
        if not container.streams.audio:
            raise MediaError(f"{label(source)} has no audio track: add one, or leave it out (use_audio_in_video false for a video)")
        rate = container.streams.audio[0].rate
        to_floats = av.AudioResampler(format="fltp")
        frames = [frame for decoded in container.decode(audio=0) for frame in to_floats.resample(decoded)]
    if not frames:
        return np.zeros((1, 0), np.float32), rate
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1), rate


def _resampled_length(length: int, original: int, rate: int) -> int:
    return -(-length * rate // original)


def _resample(samples_N: np.ndarray, original: int, rate: int) -> np.ndarray:
    """By soxr at high quality where it is installed, else by FFmpeg's resampler."""
    if original == rate or not samples_N.size:
        return samples_N
    soxr = _optional("soxr")
    resampled_N = _resample_by_av(samples_N, original, rate) if soxr is None else soxr.resample(samples_N, original, rate, quality="HQ")
    missing = _resampled_length(samples_N.size, original, rate) - resampled_N.size
    return np.pad(resampled_N, (0, missing)) if missing >= 0 else resampled_N[:missing]


def _resample_by_av(samples_N: np.ndarray, original: int, rate: int) -> np.ndarray:
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    frame = av.AudioFrame.from_ndarray(samples_N[None], format="fltp", layout="mono")
    frame.sample_rate, frame.time_base = original, Fraction(1, original)
    return np.concatenate([part.to_ndarray()[0] for chunk in (frame, None) for part in resampler.resample(chunk)])
