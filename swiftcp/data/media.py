"""Pictures and videos from whatever a row names: one resolver of sources, Pillow for images, PyAV for videos.

Sizes come from headers (`image_size`; `video_header` decodes one frame), pixels when a sample is made (`read_image`, `read_frames`).
Pixels are always 8-bit RGB: upright as EXIF or the video's display matrix say, alpha on white, 16-bit depths scaled.

Legend: T frames, H and W pixels, C = 3 colours.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import av
import numpy as np
from PIL import Image, ImageOps

from swiftcp.data.downloads import download
from swiftcp.data.rows import MediaSource
from swiftcp.errors import DataError

logger = logging.getLogger(__name__)

MAX_MISSING_FRAMES = 2
"""Frames at a video's end that its header may promise and its stream lack: cutting without re-encoding drops that many."""
_ORIENTATION_TAG = 0x0112
_SLOW_SECONDS = 10.0
"""What takes longer to decode is named in a warning: GPUs may wait for it."""
_RUNS_PROGRAMS = {"EPS"}
"""Formats that Pillow would hand to another program."""


class MediaError(DataError):
    """An image or a video cannot be read. The message names it and the remedy, not the row."""


@dataclass(frozen=True)
class MediaAccess:
    """Where media may come from, and how large they may be."""

    allow_http: bool = False
    http_timeout: float = 10.0
    """Seconds."""
    max_image_pixels: int | None = None
    """Height x width of a decoded image; None keeps Pillow's guard (twice 89 million)."""
    media_root: Path | None = None
    """Folder that every file must lie in, links followed; None: anywhere."""
    timeout: float = 120.0
    """Seconds after which the decoding of a video or of sound is given up."""


@dataclass(frozen=True)
class VideoHeader:
    num_frames: int
    fps: float
    height: int
    width: int


def label(source: MediaSource) -> str:
    """A source as errors and logs name it."""
    if isinstance(source, bytes):
        return f"({len(source)} bytes)"
    return source if len(source) <= 120 else f"{source[:60]}... ({len(source)} characters)"


def resolve(source: MediaSource, folder: Path, access: MediaAccess) -> Path | bytes:
    """A file, or the contents, that a source stands for. Paths are relative to `folder`, that of the data file.

    Raises:
        MediaError: the file is missing, the URI is malformed or refused.
    """
    if isinstance(source, bytes):
        return source
    scheme = source.split(":", 1)[0].lower() if ":" in source else ""
    if scheme == "data":
        return _data_uri(source)
    if scheme in ("http", "https"):
        return _download(source, access)
    if scheme == "file":
        return _existing(Path(unquote_to_bytes(urlsplit(source).path).decode(errors="surrogateescape")), source, access)
    if "://" in source:
        raise MediaError(f"{label(source)} has the unknown scheme {scheme}: use a path, file://, data: or http(s)://")
    return _existing(folder / source, source, access)


def _existing(path: Path, source: str, access: MediaAccess) -> Path:
    inside = exists = True
    try:
        inside = access.media_root is None or path.resolve().is_relative_to(access.media_root.resolve())
        exists = path.is_file()
    except (OSError, ValueError):  # the name is too long, or holds a null: contents without their `data:`, perhaps
        exists = False
    if not inside:
        raise MediaError(f"{label(source)} lies outside of media_root {access.media_root}: move the file there, or set media_root")
    if exists:
        return path
    raise MediaError(f"{label(source)} is no file (looked for {label(str(path))}): paths are relative to the data file")


def _data_uri(source: str) -> bytes:
    header, comma, payload = source.partition(",")
    if not comma:
        raise MediaError(f"{label(source)} has no comma: write data:image/png;base64,...")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"{label(source)} is no base64 ({error}): encode the file again") from None


def _download(source: str, access: MediaAccess) -> bytes:
    if not access.allow_http:
        raise MediaError(f"{label(source)}: downloads are off: fetch the file beforehand, or set allow_http true")
    try:
        return download(source, access.http_timeout)
    except DataError as error:
        raise MediaError(f"{label(source)} {error}") from None


def within[T](seconds: float, what: str, work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread that is left to itself where it takes too long: decoders of broken files may hang.

    Raises:
        MediaError: `seconds` are over.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    began = perf_counter()
    thread = threading.Thread(target=run, daemon=True, name=f"decoding {what}")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise MediaError(f"{what} took more than {seconds:g} s to decode and was given up: re-encode or shorten it, or raise media_timeout")
    if (took := perf_counter() - began) > _SLOW_SECONDS:
        logger.warning("%s took %.0f s to decode: shorten or re-encode it", what, took)
    if errors:
        raise errors[0]
    return results[0]


@cache
def _image_formats() -> list[str]:
    Image.init()
    return [name for name in Image.OPEN if name not in _RUNS_PROGRAMS]


@contextmanager
def _opened(source: MediaSource, folder: Path, access: MediaAccess) -> Iterator[Image.Image]:
    """An image whose header has been read; whatever goes wrong inside names the source."""
    where = resolve(source, folder, access)
    guard, limit = Image.MAX_IMAGE_PIXELS, access.max_image_pixels
    if limit is not None:
        Image.MAX_IMAGE_PIXELS = None  # the guard belongs to the process: put back below
    try:
        with Image.open(BytesIO(where) if isinstance(where, bytes) else where, formats=_image_formats()) as image:
            if limit is not None and image.width * image.height > limit:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels, more than {limit}")
            yield image
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"image {label(source)} is too large to decode ({error}): shrink it, or raise max_image_pixels") from None
    except Exception as error:  # decoders of broken files fail in many ways: OSError, SyntaxError, struct.error, ...
        raise MediaError(f"image {label(source)} cannot be read ({error or type(error).__name__}): replace the file") from None
    finally:
        Image.MAX_IMAGE_PIXELS = guard


def image_size(source: MediaSource, folder: Path, access: MediaAccess) -> tuple[int, int]:
    """(height, width) of the upright image, from its header alone.

    Raises:
        MediaError: the header cannot be read.
    """
    with _opened(source, folder, access) as image:
        return (image.width, image.height) if _orientation(image) >= 5 else (image.height, image.width)


def _orientation(image: Image.Image) -> int:
    """EXIF's figure: 1 is upright, from 5 on height and width are exchanged. Only a header is looked at."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the pixels to see whether it comes behind them
    return image.getexif().get(_ORIENTATION_TAG, 1)


def check_image(source: MediaSource, folder: Path, access: MediaAccess) -> None:
    """Decode an image to its last byte, a JPEG at an eighth of its size, and throw it away.

    Raises:
        MediaError: the file is truncated or broken.
    """
    with _opened(source, folder, access) as image:
        image.draft(None, (image.width // 8, image.height // 8))
        image.load()


def read_image(source: MediaSource, folder: Path, access: MediaAccess) -> Image.Image:
    """The image as 8-bit RGB, upright; of an animation the first frame.

    Raises:
        MediaError: the file cannot be decoded.
    """
    with _opened(source, folder, access) as image:
        if getattr(image, "is_animated", False):
            logger.info("image %s has several frames: the first is used", label(source))
        return to_rgb(image if _orientation(image) == 1 else ImageOps.exif_transpose(image))


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an image of any mode: alpha on white, 16-bit depths scaled, 32-bit ones refused.

    Raises:
        MediaError: the mode has no defined range of values.
    """
    if image.mode.startswith("I"):
        image = Image.fromarray(_scale_16_bit(np.asarray(image)))
    elif image.mode == "F":
        raise MediaError("image of 32-bit floats has no defined range: convert it to 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _scale_16_bit(values_HW: np.ndarray) -> np.ndarray:
    if values_HW.min() < 0 or values_HW.max() > 0xFFFF:
        raise MediaError("image of 32-bit integers has no defined range: convert it to 8 or 16 bits")
    return (values_HW >> 8).astype(np.uint8)


@contextmanager
def open_container(where: Path | bytes) -> Iterator[Any]:
    """A file for PyAV, which reads nothing but it: a play list that names other files, or addresses, fails."""
    with (
        BytesIO(where) if isinstance(where, bytes) else where.open("rb") as file,
        av.open(file, options={"protocol_whitelist": "pipe"}) as it,
    ):
        yield it


@contextmanager
def _opened_video(source: MediaSource, folder: Path, access: MediaAccess) -> Iterator[Any]:
    """An open container with a video stream; whatever goes wrong inside names the source."""
    where = resolve(source, folder, access)
    try:
        with open_container(where) as container:
            if not container.streams.video:
                raise MediaError(f"video {label(source)} has no video stream: replace the file")
            yield container
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, OSError) as error:
        raise MediaError(f"video {label(source)} cannot be read ({error or type(error).__name__}): replace the file") from None


def video_header(source: MediaSource, folder: Path, access: MediaAccess) -> VideoHeader:
    """Number of frames, rate and upright size. One frame is decoded, for it alone tells how the video is turned.

    Where the header has no count of frames, packets are counted.

    Raises:
        MediaError: there is no video stream, or one without frames, size or rate.
    """
    return within(access.timeout, f"video {label(source)}", lambda: _video_header(source, folder, access))


def _video_header(source: MediaSource, folder: Path, access: MediaAccess) -> VideoHeader:
    with _opened_video(source, folder, access) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        first = next(container.decode(stream), None)
        if first is None or not rate:
            raise MediaError(f"video {label(source)} has no frames, or no frame rate ({rate}): re-encode it")
        num_frames = stream.frames or _count_packets(container)
        height, width = (first.width, first.height) if _quarter_turns(first) % 2 else (first.height, first.width)
        return VideoHeader(num_frames, float(rate), height, width)


def _count_packets(container: Any) -> int:
    container.seek(0)
    return sum(packet.size > 0 for packet in container.demux(video=0))


def read_frames[T](
    source: MediaSource, folder: Path, access: MediaAccess, indices: Sequence[int], convert: Callable[[np.ndarray], T]
) -> list[T]:
    """The frames at the ascending `indices` (repeats are repeated), upright.

    Args:
        convert: called with each frame, [H, W, C] uint8, as soon as it is decoded, so that large frames need not be kept.

    Raises:
        MediaError: decoding fails, or the video ends more than `MAX_MISSING_FRAMES` before the last index.
    """
    return within(access.timeout, f"video {label(source)}", lambda: _read_frames(source, folder, access, indices, convert))


def _read_frames[T](
    source: MediaSource, folder: Path, access: MediaAccess, indices: Sequence[int], convert: Callable[[np.ndarray], T]
) -> list[T]:
    wanted = set(indices)
    frames: dict[int, T] = {}
    index, last = -1, None
    until = perf_counter() + access.timeout
    with _opened_video(source, folder, access) as container:
        container.streams.video[0].thread_type = "AUTO"
        for index, last in enumerate(container.decode(video=0)):
            if index in wanted:
                frames[index] = convert(_upright(last))
            if index >= indices[-1] or perf_counter() > until:  # nobody waits for it any more
                break
        if last is None or index + MAX_MISSING_FRAMES < indices[-1]:
            raise MediaError(f"video {label(source)} ends after {index + 1} of at least {indices[-1] + 1} frames: re-encode it")
        return [frames[i] if i in frames else convert(_upright(last)) for i in indices]


def _upright(frame: av.VideoFrame) -> np.ndarray:
    """[H, W, C]"""
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), k=_quarter_turns(frame)))


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Counterclockwise, to be upright."""
    return round(frame.rotation / 90)
