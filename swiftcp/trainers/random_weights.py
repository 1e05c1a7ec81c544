"""Random weights for `init_from_config`: each tensor from the seed and its own name, so the same in any layout and order.

The distribution is that of `transformers`: normal with the configuration's `initializer_range`; gains one, biases zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swiftcp.checkpoint.hf_reader import model_tensors
from swiftcp.checkpoint.name_table import NameTable
from swiftcp.models.family import multimodal_config
from swiftcp.parallel.place import WHOLE, TensorPlace


def random_tensor(name: str, shape: Sequence[int], *, seed: int, std: float, start: Sequence[int] = (), gain: float = 1.0) -> Tensor:
    """The float32 values of the checkpoint's tensor `name`, or of the part of it that begins at `start`; `gain` of a norm at rest."""
    if len(shape) == 1:
        return torch.full(tuple(shape), gain if name.endswith("weight") else 0.0)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), *start])
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32)) * std


def _std(name: str, hf_config: Any) -> float:
    if "visual." in name:
        part = multimodal_config(hf_config).vision_config
    elif "audio_tower." in name:
        part = multimodal_config(hf_config).audio_config
    else:
        part = hf_config.get_text_config()
    return getattr(part, "initializer_range", 0.02)


@torch.no_grad()
def initialize(model: nn.Module | Sequence[nn.Module], table: NameTable, hf_config: Any, seed: int, *, place: TensorPlace = WHOLE) -> None:
    """Fill all of the model, or of a pipeline stage's chunks; no more than one tensor of the host's memory at a time."""
    targets = model_tensors(model)
    for target, rule in table.pair(list(targets)).items():
        rank, size = place.of(is_expert=rule.is_expert)
        shape = rule.whole_shape(targets[target].shape, size)
        parts = [
            random_tensor(
                name,
                part,
                seed=seed,
                std=_std(name, hf_config),
                start=[of_dim.start for of_dim in index],
                gain=0.0 if name.endswith(table.zero_centered) else 1.0,
            )
            for name, index, part in zip(rule.sources, rule.source_slices(shape, 0, 1), rule.part_shapes(shape), strict=True)
        ]
        targets[target].copy_(rule.shard(rule.join(parts, shape), rank, size))
