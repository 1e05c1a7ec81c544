"""Samples of every modality for the tiny models, made from a seed, so that any process can make them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import IGNORED_LABEL, AudioItems, Sample, VisualItems
from swiftcp.models.family import multimodal_config
from swiftcp.models.registry import family_of

MAX_TEXT_ID = 256
"""Ids below this are text in the tiny vocabulary."""

MIXES: dict[str, list[Any]] = {
    # Runs of text by their length; media by their grids of patches (time, height, width); sound by its frames; sound in a video by
    # the grid, the frames of the sound, and the seconds between two rows of the grid.
    "text": [29],
    "image": [6, ("image", 1, 4, 8), 15],
    "three_images": [3, ("image", 1, 4, 4), 5, ("image", 1, 8, 4), 1, ("image", 1, 4, 12), 9],
    "video": [4, ("video", 3, 4, 8), 12],
    "image_and_video": [5, ("image", 1, 8, 8), 3, ("video", 2, 4, 4), 7, ("image", 1, 4, 4), 6],
    "one_token": [1],
    "seven_tokens": [7],
    "eight_tokens": [8],
    "300_tokens": [300],
    "big_image": [2, ("image", 1, 16, 12), 5],
    "audio": [5, ("audio", 170), 12],
    "short_audio": [3, ("audio", 70), 9],
    "audio_and_image": [4, ("audio", 70), 3, ("image", 1, 4, 8), 6, ("audio", 335), 5],
    "audio_in_video": [4, ("heard", 3, 4, 8, 310, 1.0), 9],
    "everything": [3, ("heard", 2, 4, 8, 150, 0.7), 2, ("image", 1, 4, 4), 5, ("audio", 130), 4, ("heard", 1, 4, 4, 99, 1.0), 7],
    "long_audio": [20, ("audio", 9170), 40],
    "long_text": [2000],
    "document": [40, ("image", 1, 64, 64), 300, ("image", 1, 48, 32), 260],
    "long_video": [30, ("video", 4, 32, 24), 200],
}


@dataclass
class _Parts:
    """Token ids with expanded placeholders, and what they stand for."""

    config: Any
    ids: list[Tensor] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sounds: list[int] = field(default_factory=list)

    def _between_markers(self, token: int, length: int) -> list[int]:
        return [self.config.vision_start_token_id, *[token] * length, self.config.vision_end_token_id]

    def image(self, *grid: int) -> None:
        self.images.append((grid[0], grid[1], grid[2]))
        self.ids.append(torch.tensor(self._between_markers(self.config.image_token_id, self._features(*grid))))

    def video(self, frames: int, height: int, width: int) -> None:
        """Qwen3-VL has a run of placeholders for each frame, Qwen3-Omni one for a video."""
        self.videos.append((frames, height, width))
        runs, length = (1, frames) if hasattr(self.config, "audio_config") else (frames, 1)
        self.ids += [torch.tensor(self._between_markers(self.config.video_token_id, self._features(length, height, width)))] * runs
        self.seconds.append(2 / 3)

    def audio(self, frames: int) -> None:
        self.sounds.append(frames)
        run = [self.config.audio_token_id] * self._sounds(frames)
        self.ids.append(torch.tensor([self.config.audio_start_token_id, *run, self.config.audio_end_token_id]))

    def heard(self, frames: int, height: int, width: int, sound: int, seconds: float) -> None:
        """A video and its sound in the order of time."""
        self.videos.append((frames, height, width))
        self.seconds.append(seconds)
        self.sounds.append(sound)
        times = torch.arange(frames).repeat_interleave(self._features(1, height, width)) * seconds * self.config.position_id_per_seconds
        order = torch.cat([times, torch.arange(self._sounds(sound)).float()]).sort(stable=True).indices
        run = torch.where(order < len(times), self.config.video_token_id, self.config.audio_token_id).tolist()
        begin, end = [self.config.audio_start_token_id], [self.config.audio_end_token_id]
        markers = self._between_markers(0, 0)
        self.ids.append(torch.tensor([markers[0], *begin, *run, *end, markers[1]]))

    def _features(self, *grid: int) -> int:
        return grid[0] * grid[1] * grid[2] // self.config.vision_config.spatial_merge_size**2

    @staticmethod
    def _sounds(frames: int) -> int:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        return int(_get_feat_extract_output_lengths(torch.tensor(frames)))


def _parts(mix: list[Any], config: Any, generator: torch.Generator) -> _Parts:
    parts = _Parts(config)
    for part in mix:
        if isinstance(part, int):
            parts.ids.append(torch.randint(0, MAX_TEXT_ID, (part,), generator=generator))
        else:
            getattr(parts, part[0])(*part[1:])
    return parts


def _visual_items(parts: _Parts, ids: Tensor, generator: torch.Generator) -> VisualItems | None:
    vision = parts.config.vision_config
    grids = torch.tensor([*parts.images, *parts.videos])
    if not len(grids):
        return None
    places = [(ids == token).nonzero().flatten() for token in (parts.config.image_token_id, parts.config.video_token_id)]
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(int(grids.prod(-1).sum()), patch_values, generator=generator)
    return VisualItems(patches_PD=patches, grid_thw=grids, positions_V=torch.cat(places))


def _audio_items(parts: _Parts, ids: Tensor, generator: torch.Generator) -> AudioItems | None:
    if not parts.sounds:
        return None
    frames = torch.tensor(parts.sounds)
    features = torch.randn(sum(parts.sounds), parts.config.audio_config.num_mel_bins, generator=generator)
    return AudioItems(features, frames, frames.max().repeat(len(frames)), (ids == parts.config.audio_token_id).nonzero().flatten())


def make_sample(name: str, hf_config: Any, *, row: int = 0, labelled: float = 0.7, span: tuple[int, int] | None = None) -> Sample:
    """The sample `name` of `MIXES`; `labelled` is the share of its text tokens that have a label (none at 0), `span` where."""
    generator = torch.Generator().manual_seed(1000 * row + sum(map(ord, name)))
    parts = _parts(MIXES[name], multimodal_config(hf_config), generator)
    ids = torch.cat(parts.ids)
    is_text = ids < MAX_TEXT_ID
    keep = is_text & (torch.rand(len(ids), generator=generator) < labelled)
    if span is not None:
        keep &= (torch.arange(len(ids)) >= span[0]) & (torch.arange(len(ids)) < span[1])
    weights = torch.where(keep, torch.randint(1, 3, (len(ids),), generator=generator).float(), 0.0)
    media = (torch.tensor(values) if values else None for values in (parts.images, parts.videos, parts.seconds))
    return Sample(
        row=row,
        input_ids_L=ids,
        labels_L=torch.where(keep, ids, IGNORED_LABEL),
        weights_L=weights,
        position_ids_3L=family_of(hf_config.model_type).position_ids(hf_config, ids, *media),
        visual=_visual_items(parts, ids, generator),
        audio=_audio_items(parts, ids, generator),
        seconds_per_grid_W=torch.tensor(parts.seconds) if parts.seconds else None,
    )
