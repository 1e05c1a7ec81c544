"""Packs of random tokens and images, for measurements: the same form and sizes as real ones, from a seed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import IGNORED_LABEL, Batch, Sample, VisualItems, collate_pack
from swiftcp.models.family import Family
from swiftcp.models.towers import VisionGeometry


def image_grid(num_tokens: int, merge_size: int) -> tuple[int, int, int]:
    """(1, rows, columns) of patches of an image of that many tokens, as square as they divide."""
    rows = next(rows for rows in range(math.isqrt(num_tokens), 0, -1) if num_tokens % rows == 0)
    return 1, rows * merge_size, num_tokens // rows * merge_size


def _token_ids(num_tokens: int, num_images: int, image_tokens: int, hf_config: Any, generator: torch.Generator) -> Tensor:
    """[num_tokens] int64: runs of random text of about one length around the images, each between its markers."""
    num_text = num_tokens - num_images * (image_tokens + 2)
    lengths = [num_text * (run + 1) // (num_images + 1) - num_text * run // (num_images + 1) for run in range(num_images + 1)]
    first_special = min(hf_config.image_token_id, hf_config.video_token_id, hf_config.vision_start_token_id)
    runs = [torch.randint(0, first_special, (length,), generator=generator) for length in lengths]
    image = [hf_config.vision_start_token_id, *[hf_config.image_token_id] * image_tokens, hf_config.vision_start_token_id + 1]
    parts = [runs[0], *(part for run in runs[1:] for part in (torch.tensor(image), run))]
    return torch.cat(parts)


def random_sample(
    num_tokens: int,
    num_images: int,
    image_tokens: int,
    family: Family,
    hf_config: Any,
    geometry: VisionGeometry,
    generator: torch.Generator,
) -> Sample:
    """One sample; every text token is labelled."""
    ids = _token_ids(num_tokens, num_images, image_tokens, hf_config, generator)
    is_text = ids != hf_config.image_token_id
    visual, grids = None, None
    if num_images:
        grids = torch.tensor([image_grid(image_tokens, geometry.merge_size)] * num_images)
        patches = torch.randn(int(grids.prod(-1).sum()), geometry.patch_values, generator=generator)
        visual = VisualItems(patches, grids, (~is_text).nonzero().flatten())
    return Sample(
        row=0,
        input_ids_L=ids,
        labels_L=torch.where(is_text, ids, IGNORED_LABEL),
        weights_L=is_text.float(),
        position_ids_3L=family.position_ids(hf_config, ids, grids, None, None),
        visual=visual,
    )


def random_pack(
    num_tokens: int,
    num_sequences: int,
    num_images: int,
    image_tokens: int,
    *,
    family: Family,
    hf_config: Any,
    geometry: VisionGeometry,
    seed: int,
) -> Batch:
    """A pack of `num_sequences` equally long samples; images are dealt out in turn."""
    generator = torch.Generator().manual_seed(seed)
    length = num_tokens // num_sequences
    images = [len(range(number, num_images, num_sequences)) for number in range(num_sequences)]
    samples = [random_sample(length, count, image_tokens, family, hf_config, geometry, generator) for count in images]
    return collate_pack(samples, pack_align=length, pad_token_id=0)
