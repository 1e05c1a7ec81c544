"""Random weights for `init_from_config` depend on seed and name alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from swiftcp.checkpoint.name_table import Direct, GateUp, NameTable
from swiftcp.parallel.place import TensorPlace
from swiftcp.trainers.random_weights import initialize, random_tensor

TABLE = NameTable(
    rules=(
        GateUp(("gate.weight", "up.weight"), ("mlp.weight",), parallel_dim=0),
        Direct(("norm.weight",), ("norm.weight",)),
        Direct(("norm.bias",), ("norm.bias",)),
    ),
    num_layers=0,
    tied={},
    base_prefix="model.",
)


def hf_config(std: float = 0.5) -> Any:
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(initializer_range=std))


class Part(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(6, rows, bias=False)
        self.norm = nn.LayerNorm(6)


def test_every_tensor_is_its_own_whatever_the_order() -> None:
    one = random_tensor("a.weight", (300, 40), seed=1, std=0.02)
    assert torch.equal(one, random_tensor("a.weight", (300, 40), seed=1, std=0.02))
    assert not torch.equal(one, random_tensor("b.weight", (300, 40), seed=1, std=0.02))
    assert not torch.equal(one, random_tensor("a.weight", (300, 40), seed=2, std=0.02))
    assert abs(one.std().item() - 0.02) < 1e-3 and abs(one.mean().item()) < 1e-3


def test_gains_are_one_and_biases_zero() -> None:
    part = Part(8)
    initialize(part, TABLE, hf_config(), seed=3)
    assert torch.equal(part.norm.weight, torch.ones(6)) and torch.equal(part.norm.bias, torch.zeros(6))


def test_parameters_are_made_of_the_checkpoints_tensors() -> None:
    part = Part(8)
    initialize(part, TABLE, hf_config(), seed=3)
    gate, up = (random_tensor(name, (4, 6), seed=3, std=0.5) for name in ("gate.weight", "up.weight"))
    assert torch.equal(part.mlp.weight, torch.cat([gate, up]))


def test_tensor_parallel_ranks_hold_parts_of_the_same_whole() -> None:
    whole, parts = Part(8), [Part(4), Part(4)]
    initialize(whole, TABLE, hf_config(), seed=3)
    for rank, part in enumerate(parts):
        initialize(part, TABLE, hf_config(), seed=3, place=TensorPlace(rank, 2))
    gates, ups = zip(*(part.mlp.weight.chunk(2) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), whole.mlp.weight)
