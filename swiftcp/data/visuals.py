"""A row's images and videos through the checkpoint's own processors: grids and placeholders from headers, patches from pixels.

Grids are found by sending a tensor without storage (device `meta`) of the same size through the processor, so no resizing rule is
repeated here and a sample's length cannot differ from the sample. Which frames of a video are read is the video processor's choice.

Legend: I images, W videos, T frames, P patches, D values of a patch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLVideoProcessor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from swiftcp.data.media import MediaAccess, MediaError, check_image, image_size, label, read_frames, read_image, video_header
from swiftcp.data.rows import AudioPart, ImagePart, MediaPart, Row, TextPart, VideoPart
from swiftcp.errors import ConfigError

_FPS = 2.0
"""Frames a second that are taken from a video where the checkpoint states no rate, as Qwen's own tools do."""
_FRAME_FLOOR = 1.05
"""The video processor never goes below this many times the minimum when it caps the pixels of a frame."""


@dataclass(frozen=True)
class MediaLimits:
    """Overrides of what the checkpoint's processors allow; None keeps the checkpoint's figure. Tokens are merged patches."""

    image_max_token_num: int | None = None
    image_min_token_num: int | None = None
    video_max_token_num: int | None = None
    """Of a frame."""
    video_min_token_num: int | None = None
    fps: float | None = None
    """Frames a second that are sampled from a video."""
    fps_min_frames: int | None = None
    fps_max_frames: int | None = None

    def validate(self) -> None:
        """Raises ConfigError where a figure is not above 0."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise ConfigError(f"{limit.name} {value}: it must be above 0")


@dataclass(frozen=True)
class MediaPlan:
    """What the headers of a row's media say."""

    image_grid_thw: Tensor
    """[I, 3] int64 patches."""
    video_grid_thw: Tensor
    """[W, 3] int64."""
    video_metadata: tuple[VideoMetadata, ...]
    """With the indices of the frames to read."""
    seconds_per_grid_W: Tensor
    """[W] float32: between two rows of frames in a video's grid."""
    kinds: tuple[str, ...]
    """"image", "video" or "audio", in the order of the conversation."""
    num_frames_A: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[A] frames of features of each sound; see `swiftcp.data.sounds`."""


def limit_processor(processor: Any, limits: MediaLimits) -> Any:
    """A copy of a checkpoint's processor under other limits; its tokenizer is shared.

    Raises:
        ConfigError: a limit is not above 0, or a minimum exceeds its maximum.
    """
    limits.validate()
    limited = copy.copy(processor)
    limited.image_processor = _limit_images(_with_defaults(processor, "image"), limits)
    limited.video_processor = _limit_videos(_with_defaults(processor, "video"), limits)
    return limited


def _with_defaults(processor: Any, kind: str) -> Any:
    """A copy of the image or video processor with the size that the whole processor would call it with, whatever its own is."""
    own = copy.deepcopy(getattr(processor, f"{kind}_processor"))
    size = type(processor).valid_processor_kwargs._defaults.get(f"{kind}s_kwargs", {}).get("size")
    if size is not None:
        own.size = SizeDict(**size)
    return own


def _token_pixels(processor: Any) -> int:
    return (processor.patch_size * processor.merge_size) ** 2


def _limit_images(processor: Any, limits: MediaLimits) -> Any:
    smallest, largest = limits.image_min_token_num, limits.image_max_token_num
    pixels = _token_pixels(processor)
    if smallest is not None:
        processor.size["shortest_edge"] = smallest * pixels
    if largest is not None:
        processor.size["longest_edge"] = largest * pixels
    least, most = processor.size["shortest_edge"] / pixels, processor.size["longest_edge"] / pixels
    if least > most:
        raise ConfigError(f"image_min_token_num {least:g} exceeds image_max_token_num {most:g}: set both")
    return processor


def _limit_videos(processor: Any, limits: MediaLimits) -> Any:
    pixels = _token_pixels(processor)
    if limits.video_min_token_num is not None:
        processor.size["shortest_edge"] = limits.video_min_token_num * pixels
    if limits.video_max_token_num is not None and not isinstance(processor, Qwen3VLVideoProcessor):
        processor.size["longest_edge"] = limits.video_max_token_num * pixels  # of one frame, as in Qwen2-VL
        if processor.size["shortest_edge"] > processor.size["longest_edge"]:
            least = processor.size["shortest_edge"] / pixels
            raise ConfigError(f"video_max_token_num {limits.video_max_token_num} is less than video_min_token_num {least:g}: set both")
    elif limits.video_max_token_num is not None:
        processor.cap_pixels_per_frame, processor.max_video_tokens = True, limits.video_max_token_num
        least = _FRAME_FLOOR * processor.size["shortest_edge"] / pixels
        if least > limits.video_max_token_num:
            raise ConfigError(
                f"video_max_token_num {limits.video_max_token_num} is less than {_FRAME_FLOOR} x video_min_token_num = {least:g}: set both"
            )
    if processor.cap_pixels_per_frame is None:
        processor.cap_pixels_per_frame = False  # what None means in transformers 5.17, which warns and will change it
    processor.fps = limits.fps or processor.fps or (None if processor.num_frames else _FPS)
    processor.min_frames = limits.fps_min_frames or processor.min_frames
    processor.max_frames = limits.fps_max_frames or processor.max_frames
    if processor.min_frames > processor.max_frames:
        raise ConfigError(f"fps_min_frames {processor.min_frames} exceeds fps_max_frames {processor.max_frames}: set both")
    return processor


class Visuals:
    """One checkpoint's image and video processors, and where media may come from."""

    def __init__(self, processor: Any, access: MediaAccess) -> None:
        self._processor = processor
        self._access = access
        self._grids: dict[tuple[int, ...], list[int]] = {}
        """By (T, H, W), T = 0 for an image."""

    def plan(self, row: Row) -> MediaPlan:
        """Grids and frames of a row's media, from their headers.

        Raises:
            MediaError: a header cannot be read, or the processor refuses the size.
        """
        folder = row.file.parent
        image_grids = [self._image_grid(part, folder) for part in row.images]
        videos = [self._video_metadata(part, folder) for part in row.videos]
        video_grids = [self._video_grid(part, metadata) for part, metadata in zip(row.videos, videos, strict=True)]
        return MediaPlan(
            torch.tensor(image_grids, dtype=torch.int64).view(-1, 3),
            torch.tensor(video_grids, dtype=torch.int64).view(-1, 3),
            tuple(videos),
            torch.tensor([self._seconds_per_grid(metadata) for metadata in videos]),
            tuple(part.kind for message in row.messages for part in message.parts if not isinstance(part, TextPart)),
        )

    def _seconds_per_grid(self, metadata: VideoMetadata) -> float:
        """The time that the frames of one patch stand for, by the rate at which frames were really taken."""
        num_frames = len(set(metadata.frames_indices or ()))
        return self._processor.video_processor.temporal_patch_size * (metadata.duration or 0.0) / max(num_frames, 1)

    def image_sizes(self, row: Row) -> dict[int, tuple[int, int]]:
        """(height, width) of each image that a box of the row's objects lies in, by index.

        Raises:
            MediaError: a header cannot be read.
        """
        wanted = set(row.objects.image_ids) if row.objects is not None else ()
        return {index: image_size(row.images[index].source, row.file.parent, self._access) for index in wanted}

    def patches(self, row: Row, plan: MediaPlan) -> Tensor:
        """[P, D] float32: the patches of all images, then of all videos.

        Raises:
            MediaError: pixels cannot be decoded, or are not what the header said.
        """
        folder = row.file.parent
        patches_PD, grids = [], []
        if row.images:
            images = [read_image(part.source, folder, self._access) for part in row.images]
            done = self._processor.image_processor(images=images, return_tensors="pt")
            patches_PD.append(done["pixel_values"])
            grids.append(done["image_grid_thw"])
        if row.videos:
            expected = zip(row.videos, plan.video_metadata, plan.video_grid_thw.tolist(), strict=True)
            videos = [self._read_video(part, folder, metadata, grid) for part, metadata, grid in expected]
            done = self._process_videos(videos, plan.video_metadata, do_resize=False)
            patches_PD.append(done["pixel_values_videos"])
            grids.append(done["video_grid_thw"])
        if not torch.equal(torch.cat(grids), torch.cat([plan.image_grid_thw, plan.video_grid_thw])):
            raise MediaError("the decoded media are not as large as their headers say: check the files")
        return torch.cat(patches_PD).float()

    def check(self, parts: Sequence[MediaPart], folder: Path) -> None:
        """Decode images, and of videos every frame up to the last that is taken.

        Raises:
            MediaError: a file is broken.
        """
        for part in parts:
            if isinstance(part, VideoPart) and not isinstance(part.source, tuple):
                indices = self._video_metadata(part, folder).frames_indices or []
                read_frames(part.source, folder, self._access, indices, lambda frame: None)
            elif not isinstance(part, AudioPart):
                for source in part.source if isinstance(part.source, tuple) else (part.source,):
                    check_image(source, folder, self._access)

    def _image_grid(self, part: ImagePart, folder: Path) -> list[int]:
        height, width = image_size(part.source, folder, self._access)
        if (0, height, width) not in self._grids:
            empty = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
            try:
                done = self._processor.image_processor(images=[empty], input_data_format="channels_first", return_tensors="pt")
            except ValueError as error:
                raise _refused(f"image {label(part.source)}", height, width, error) from None
            self._grids[0, height, width] = done["image_grid_thw"][0].tolist()
        return self._grids[0, height, width]

    def _video_grid(self, part: VideoPart, metadata: VideoMetadata) -> list[int]:
        size = (len(metadata.frames_indices or ()), metadata.height or 0, metadata.width or 0)
        if size not in self._grids:
            empty = torch.empty(size[0], 3, *size[1:], dtype=torch.uint8, device="meta")
            try:
                done = self._process_videos([empty], [metadata])
            except ValueError as error:
                raise _refused(_video_label(part), *size[1:], error) from None
            self._grids[size] = done["video_grid_thw"][0].tolist()
        return self._grids[size]

    def _process_videos(self, videos: Sequence[Tensor], metadata: Sequence[VideoMetadata], *, do_resize: bool = True) -> Any:
        """`videos` are [T, 3, H, W], already sampled."""
        return self._processor.video_processor(
            videos=list(videos),
            video_metadata=list(metadata),
            do_sample_frames=False,
            do_resize=do_resize,
            input_data_format="channels_first",
            return_tensors="pt",
        )

    def _video_metadata(self, part: VideoPart, folder: Path) -> VideoMetadata:
        """Size and rate of a video, and which of its frames are read: at least as many as the patch embedding joins in time."""
        if isinstance(part.source, tuple):
            height, width = image_size(part.source[0], folder, self._access)
            metadata = VideoMetadata(total_num_frames=len(part.source), fps=part.fps, height=height, width=width)
            indices = list(range(len(part.source)))
        else:
            header = video_header(part.source, folder, self._access)
            metadata = VideoMetadata(total_num_frames=header.num_frames, fps=header.fps, height=header.height, width=header.width)
            indices = self._sample(metadata, part.fps)
        missing = self._processor.video_processor.temporal_patch_size - len(indices)
        metadata.frames_indices = indices + indices[-1:] * missing
        metadata.duration = metadata.total_num_frames / (metadata.fps or 1.0)
        return metadata

    def _sample(self, metadata: VideoMetadata, fps: float | None) -> list[int]:
        processor = self._processor.video_processor
        if metadata.total_num_frames < processor.temporal_patch_size:
            return list(range(metadata.total_num_frames))
        num_frames = None if fps else processor.num_frames
        indices = processor.sample_frames(metadata=metadata, num_frames=num_frames, fps=fps or (None if num_frames else processor.fps))
        return [int(index) for index in indices]

    def _read_video(self, part: VideoPart, folder: Path, metadata: VideoMetadata, grid_thw: Sequence[int]) -> Tensor:
        """[T, 3, H, W] uint8, resized to the grid frame by frame: all frames of a long video as they are would not fit the memory."""
        processor = self._processor.video_processor
        height, width = (number * processor.patch_size for number in grid_thw[1:])
        size = SizeDict(height=height, width=width)

        def resized(frame_HWC: np.ndarray) -> Tensor:
            if frame_HWC.shape[:2] != (metadata.height, metadata.width):
                raise MediaError(f"{_video_label(part)} has frames of different sizes: resize or re-encode it")
            frame = torch.from_numpy(frame_HWC).permute(2, 0, 1)[None]
            return BaseVideoProcessor.resize(processor, frame, size, processor.resample)[0]

        indices = metadata.frames_indices or []
        if isinstance(part.source, tuple):
            return torch.stack([resized(np.array(read_image(part.source[index], folder, self._access))) for index in indices])
        return torch.stack(read_frames(part.source, folder, self._access, indices, resized))


def _video_label(part: VideoPart) -> str:
    if isinstance(part.source, tuple):
        return f"video of {len(part.source)} frames from {label(part.source[0])} on"
    return f"video {label(part.source)}"


def _refused(what: str, height: int, width: int, error: ValueError) -> MediaError:
    return MediaError(f"{what} of {width}x{height} pixels is refused by the checkpoint's processor ({error}): crop or pad it")
