"""Qwen3.5, dense and MoE: against `transformers` row by row, layouts against one rank, weights there and back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.layout_harness import (
    ONE_RANK,
    WEIGHT_BOUND,
    Layout,
    Result,
    differences,
    measure_layout,
    over_bounds,
    weight_difference,
)
from tests.distributed.model_harness import Row, run_ours, run_transformers
from tests.distributed.moe_harness import export_untrained
from tests.distributed.ranks import RankPool
from tests.distributed.test_model_parity import check
from tests.unit.folders import assert_same_bits, read_folder

TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
WHOLE = {"cp_partition_mode": "whole"}
"""The rows of the second pack stay whole: the delta nets undo that partition too."""
LAYOUTS = {
    "tiny_qwen3_5": {"TP2": Layout(2, TP2), "TP2+SP+CP2": Layout(4, TP2 | SP | CP2), "PP2+CP2": Layout(4, PP2 | CP2 | WHOLE)},
    "tiny_qwen3_5_moe": {
        "EP2": Layout(2, EP2),
        "PP2+EP2+CP2": Layout(4, PP2 | EP2 | CP2),
        "TP2+SP+EP2+CP2, experts cut": Layout(4, TP2 | SP | EP2 | CP2 | {"expert_tensor_parallel_size": 2}),
    },
}

ROWS = (Row("one_token"), Row("image_and_video"), Row("seven_tokens"), Row("300_tokens"), Row("three_images"))
"""Their delta nets and convolutions would see the rows before them if anything leaked."""


@pytest.mark.parametrize(
    ("family", "packing", "cp_size"),
    [
        *(("tiny_qwen3_5", True, cp_size) for cp_size in (1, 2, 4)),
        *(("tiny_qwen3_5", False, cp_size) for cp_size in (1, 4)),
        *(("tiny_qwen3_5_moe", True, cp_size) for cp_size in (1, 4)),
        ("tiny_qwen3_5_moe", False, 2),
    ],
)
def test_a_batch_equals_transformers(ranks: RankPool, family: str, packing: bool, cp_size: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    expected = ranks.run(run_transformers, folder, ROWS, num_ranks=1)[0]
    for result in ranks.run(run_ours, folder, ROWS, cp_size, packing, num_ranks=cp_size):
        check(result, expected)


@pytest.mark.parametrize("family", LAYOUTS)
def test_layouts_give_what_one_rank_gives(ranks: RankPool, family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    expected: Result = measure_layout(ranks, folder, ONE_RANK)[0]
    for name, layout in LAYOUTS[family].items():
        for result in measure_layout(ranks, folder, layout):
            found = [differences(got, of_one) for got, of_one in ((result.packed, expected.packed), (result.padded, expected.padded))]
            print(name, *found, weight_difference(result, expected))
            assert [over_bounds(one) for one in found] == [{}, {}], name
            assert weight_difference(result, expected) <= WEIGHT_BOUND, name


def with_fused_experts(folder: Path, output: Path) -> Path:
    """The same checkpoint with all experts of a layer in one tensor, and with weights for multi-token prediction."""
    shutil.copytree(folder, output)
    tensors = load_file(output / "model.safetensors")
    single = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
    parts = {match.groups(): tensors.pop(match[0]) for name in list(tensors) if (match := single.fullmatch(name))}
    for prefix in {prefix for prefix, _, _ in parts}:
        stacks = {kind: torch.stack([parts[prefix, str(expert), kind] for expert in range(4)]) for kind in ("gate", "up", "down")}
        tensors[f"{prefix}gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], dim=1)
        tensors[f"{prefix}down_proj"] = stacks["down"]
    tensors["mtp.fc.weight"] = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def test_weights_come_back_equal_to_the_bit(ranks: RankPool, tiny_qwen3_5: Path, tiny_qwen3_5_moe: Path, tmp_path: Path) -> None:
    layout = TP2 | SP | CP2
    fused = with_fused_experts(tiny_qwen3_5_moe, tmp_path / "fused")
    for number, folder in enumerate((tiny_qwen3_5, tiny_qwen3_5_moe, fused)):
        output = tmp_path / f"out{number}"
        ranks.run(export_untrained, folder, output, layout | ({} if number == 0 else EP2), num_ranks=4)
        assert_same_bits(read_folder(output), read_folder(folder))
