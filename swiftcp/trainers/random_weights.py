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


def random_tensor(name: str, shape: Sequence[int], *, seed: int, std: float) -> Tensor:
    """The float32 values of the checkpoint's tensor `name`."""
    if len(shape) == 1:
        return torch.full(tuple(shape), float(name.endswith("weight")))
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32)) * std


def _std(name: str, hf_config: Any) -> float:
    part = hf_config.vision_config if ".visual." in name else hf_config.get_text_config()
    return getattr(part, "initializer_range", 0.02)


@torch.no_grad()
def initialize(
    model: nn.Module | Sequence[nn.Module], table: NameTable, hf_config: Any, seed: int, *, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Fill all of the model, or of a pipeline stage's chunks; no more than one tensor of the host's memory at a time."""
    targets = model_tensors(model)
    for target, rule in table.pair(list(targets)).items():
        shape = rule.whole_shape(targets[target].shape, tp_size)
        sources = [
            random_tensor(name, source_shape, seed=seed, std=_std(name, hf_config))
            for name, source_shape in zip(rule.sources, rule.source_shapes(shape), strict=True)
        ]
        targets[target].copy_(rule.shard(rule.join(sources, shape), tp_rank, tp_size))
