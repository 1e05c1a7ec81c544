"""Samples of every modality for the tiny Qwen3-VL, made from a seed, so that any process can make them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import IGNORED_LABEL, Sample, VisualItems
from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids

MAX_TEXT_ID = 256
"""Ids below this are text in the tiny vocabulary."""

MIXES: dict[str, list[Any]] = {
    # Runs of text by their length; media by their grids of patches (time, height, width).
    "text": [29],
    "image": [6, ("image", 1, 4, 8), 15],
    "three_images": [3, ("image", 1, 4, 4), 5, ("image", 1, 8, 4), 1, ("image", 1, 4, 12), 9],
    "video": [4, ("video", 3, 4, 8), 12],
    "image_and_video": [5, ("image", 1, 8, 8), 3, ("video", 2, 4, 4), 7, ("image", 1, 4, 4), 6],
    "one_token": [1],
    "seven_tokens": [7],
    "eight_tokens": [8],
    "big_image": [2, ("image", 1, 16, 12), 5],
    "long_text": [2000],
    "document": [40, ("image", 1, 64, 64), 300, ("image", 1, 48, 32), 260],
    "long_video": [30, ("video", 4, 32, 24), 200],
}


def _parts(
    mix: list[Any], hf_config: Any, generator: torch.Generator
) -> tuple[Tensor, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Token ids with expanded placeholders, and the grids of images and of videos."""
    merged = hf_config.vision_config.spatial_merge_size**2
    ids: list[Tensor] = []
    images, videos = [], []
    for part in mix:
        if isinstance(part, int):
            ids.append(torch.randint(0, MAX_TEXT_ID, (part,), generator=generator))
            continue
        kind, frames, height, width = part
        (images if kind == "image" else videos).append((frames, height, width))
        token = hf_config.image_token_id if kind == "image" else hf_config.video_token_id
        for _ in range(frames):
            run = [hf_config.vision_start_token_id, *[token] * (height * width // merged), hf_config.vision_end_token_id]
            ids.append(torch.tensor(run))
    return torch.cat(ids), images, videos


def make_sample(name: str, hf_config: Any, *, row: int = 0, labelled: float = 0.7, span: tuple[int, int] | None = None) -> Sample:
    """The sample `name` of `MIXES`; `labelled` is the share of its text tokens that have a label (none at 0), `span` where."""
    generator = torch.Generator().manual_seed(1000 * row + sum(map(ord, name)))
    ids, images, videos = _parts(MIXES[name], hf_config, generator)
    is_text = ids < MAX_TEXT_ID
    keep = is_text & (torch.rand(len(ids), generator=generator) < labelled)
    if span is not None:
        keep &= (torch.arange(len(ids)) >= span[0]) & (torch.arange(len(ids)) < span[1])
    weights = torch.where(keep, torch.randint(1, 3, (len(ids),), generator=generator).float(), 0.0)
    patch_values = hf_config.vision_config.in_channels * hf_config.vision_config.temporal_patch_size * hf_config.vision_config.patch_size**2
    grids = torch.tensor([*images, *videos])
    visual = None
    if len(grids):
        places = [(ids == token).nonzero().flatten() for token in (hf_config.image_token_id, hf_config.video_token_id)]
        patches = torch.randn(int(grids.prod(-1).sum()), patch_values, generator=generator)
        visual = VisualItems(patches_PD=patches, grid_thw=grids, positions_V=torch.cat(places))
    return Sample(
        row=row,
        input_ids_L=ids,
        labels_L=torch.where(keep, ids, IGNORED_LABEL),
        weights_L=weights,
        position_ids_3L=qwen3_vl_position_ids(
            ids,
            torch.tensor(images) if images else None,
            torch.tensor(videos) if videos else None,
            image_token_id=hf_config.image_token_id,
            video_token_id=hf_config.video_token_id,
            spatial_merge_size=hf_config.vision_config.spatial_merge_size,
        ),
        visual=visual,
    )
