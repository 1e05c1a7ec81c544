"""Multimodal rotary positions of one Qwen3-VL sample, from its token ids and the grids of its media; no model is built.

Text counts up by one on all three axes. An image's features sit on a grid of (frame, row, column) that starts where the text
left off, and the text behind it goes on from the grid's longer side. A video is one such grid for each pair of frames, for the
processor writes a timestamp before each of them (so `grid_thw` has one row a video, the token stream one run of placeholders
a frame). The rule is that of `Qwen3VLModel.get_rope_index` in `transformers`, and is tested equal to it.

Legend: L tokens of the sample, I images, W videos, N merged features of one run of placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def qwen3_vl_position_ids(
    input_ids_L: Tensor,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    spatial_merge_size: int,
) -> Tensor:
    """[3, L] int64 positions (time, height, width) of one sample alone, starting at 0.

    Args:
        input_ids_L: with every placeholder expanded.
        image_grid_thw: [I, 3] patches, before merging; None without images.
        video_grid_thw: [W, 3] likewise; None without videos.

    Raises:
        ValueError: the runs of placeholders are not those that the grids ask for.
    """
    grids = {
        image_token_id: _grids(image_grid_thw, spatial_merge_size, by_frame=False),
        video_token_id: _grids(video_grid_thw, spatial_merge_size, by_frame=True),
    }
    start = 0
    parts = []
    for token, length in _runs(input_ids_L, image_token_id, video_token_id):
        if token in grids:
            grid = next(grids[token], None)
            if grid is None or grid[0] * grid[1] * grid[2] != length:
                raise ValueError(f"a run of {length} placeholders of token {token} does not fit its grid of merged patches {grid}")
            parts.append(_grid_positions(grid) + start)
            start += max(grid[1], grid[2])
        else:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
    left = [token for token, iterator in grids.items() if next(iterator, None) is not None]
    if left:
        raise ValueError(f"there are more media than runs of placeholders of the tokens {left}")
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.int64)


def _grids(grid_thw: Tensor | None, merge: int, *, by_frame: bool) -> Iterator[tuple[int, int, int]]:
    """Merged (frames, rows, columns) of each run of placeholders, in order."""
    for frames, rows, columns in [] if grid_thw is None else grid_thw.tolist():
        grid = rows // merge, columns // merge
        for _ in range(frames if by_frame else 1):
            yield (1, *grid) if by_frame else (frames, *grid)


def _runs(input_ids_L: Tensor, image_token_id: int, video_token_id: int) -> Iterator[tuple[int, int]]:
    """(placeholder token, or -1 for text; length) of each run."""
    kinds_L = torch.where((input_ids_L == image_token_id) | (input_ids_L == video_token_id), input_ids_L, -1)
    kinds, lengths = kinds_L.unique_consecutive(return_counts=True)
    yield from zip(kinds.tolist(), lengths.tolist(), strict=True)


def _grid_positions(grid: tuple[int, int, int]) -> Tensor:
    """[3, N] frame, row and column of each merged feature, row by row."""
    return torch.stack(torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")).flatten(1)
