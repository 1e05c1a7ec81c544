"""Multimodal rotary positions of one Qwen3-Omni sample, from its token ids and the grids of its media; no model is built.

Text and sound count up by one on all three axes. An image's features sit on a grid of (time, row, column) that starts where the
text left off. So does a video's, all its frames in one run, with time in steps of `position_id_per_seconds`, which may lie between
whole positions. The sound of a video starts where its frames do, and both are merged in the order of time. What follows a medium
goes on behind the highest position of its last run. The rule is that of `get_rope_index` in `transformers`, and is tested equal.

Legend: L tokens of the sample, I images, W videos, N merged features of one medium, E features of a video's sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OmniTokens:
    """Placeholders, and what the rule takes from the checkpoint's configuration."""

    image: int
    video: int
    audio: int
    position_id_per_seconds: float
    spatial_merge_size: int


def qwen3_omni_position_ids(
    input_ids_L: Tensor,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    seconds_per_grid_W: Tensor | None,
    tokens: OmniTokens,
) -> Tensor:
    """[3, L] float32 positions (time, height, width) of one sample alone, starting at 0.

    Args:
        input_ids_L: with every placeholder expanded; markers stand between media.
        image_grid_thw: [I, 3] patches, before merging; None without images.
        video_grid_thw: [W, 3] likewise; None without videos.
        seconds_per_grid_W: [W] seconds between two rows of frames in a video's grid.

    Raises:
        ValueError: the runs of placeholders are not those that the grids ask for.
    """
    images = _grids(image_grid_thw, None, tokens)
    videos = _grids(video_grid_thw, seconds_per_grid_W, tokens)
    start = torch.zeros(())
    parts = []
    for kinds, num_tokens, num_sounds in _runs(input_ids_L, tokens):
        if not kinds & {tokens.image, tokens.video}:
            here = [_line(num_tokens) + start]
        else:
            grid_3N = next(images if tokens.image in kinds else videos, None)
            if grid_3N is None or grid_3N.size(1) != num_tokens - num_sounds:
                raise ValueError(f"a run of {num_tokens - num_sounds} placeholders of {kinds} does not fit its grid of merged patches")
            here = _merged(grid_3N + start, _line(num_sounds) + start)
        parts += here
        start = here[-1].max() + 1
    if next(images, None) is not None or next(videos, None) is not None:
        raise ValueError("there are more images or videos than runs of placeholders")
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0)


def _runs(input_ids_L: Tensor, tokens: OmniTokens) -> Iterator[tuple[set[int], int, int]]:
    """(kinds of placeholders in it; tokens; of them sounds) of each run of text, or of one medium: sound may lie between frames."""
    is_media = torch.isin(input_ids_L, torch.tensor([tokens.image, tokens.video, tokens.audio]))
    media, lengths = is_media.unique_consecutive(return_counts=True)
    for run, is_medium in zip(input_ids_L.split(lengths.tolist()), media.tolist(), strict=True):
        yield set(run.unique().tolist()) if is_medium else set(), len(run), int((run == tokens.audio).sum())


def _grids(grid_thw: Tensor | None, seconds_W: Tensor | None, tokens: OmniTokens) -> Iterator[Tensor]:
    """[3, N] time, row and column of each merged feature of each medium, row by row, counted from its first feature."""
    for number, (frames, rows, columns) in enumerate([] if grid_thw is None else grid_thw.tolist()):
        seconds = 1.0 if seconds_W is None else seconds_W[number].float()
        times = torch.arange(frames) * seconds * tokens.position_id_per_seconds
        sides = (torch.arange(side // tokens.spatial_merge_size).float() for side in (rows, columns))
        yield torch.stack(torch.meshgrid(times.float(), *sides, indexing="ij")).flatten(1)


def _line(length: int) -> Tensor:
    """[3, length]"""
    return torch.arange(length).float().expand(3, -1)


def _merged(grid_3N: Tensor, sound_3E: Tensor) -> list[Tensor]:
    """Frames and sound in the order of time, frames first where both are equal; the last part is what one has behind the other's end."""
    both = torch.cat([grid_3N, sound_3E], dim=1)
    order = both[0].sort(stable=True).indices
    is_sound = order >= grid_3N.size(1)
    rest = 1 if not sound_3E.size(1) else int((is_sound != is_sound[-1]).nonzero()[-1]) + 1
    merged = both[:, order]
    return [merged[:, :rest], merged[:, rest:]] if sound_3E.size(1) else [merged]
