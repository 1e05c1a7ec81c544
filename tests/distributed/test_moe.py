"""Qwen3-VL-MoE: against `transformers` row by row, layouts against one rank, router losses against a naive loop, weights there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import model_harness
from tests.distributed.layout_harness import (
    PACKS,
    WEIGHT_BOUND,
    Layout,
    Result,
    differences,
    gradients_of_modes,
    measure_layout,
    over_bounds,
    weight_difference,
)
from tests.distributed.model_harness import gradient_excess, run_ours, run_transformers
from tests.distributed.moe_harness import export_untrained, gradients_of_batches, reference, routed, routed_by_transformers
from tests.distributed.ranks import RankPool
from tests.distributed.test_model_parity import MIXED, check
from tests.distributed.training_harness import Pack
from tests.unit.folders import assert_same_bits, read_folder

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "TP2+SP": Layout(2, TP2),
    "TP2+SP, experts cut": Layout(2, TP2 | {"expert_tensor_parallel_size": 2}),
    "TP2+SP+EP2": Layout(2, TP2 | EP2),
    "PP2": Layout(2, PP2),
    "EP2": Layout(2, EP2),
    "EP2+CP2": Layout(2, EP2 | CP2),
    "PP2+EP2+CP2": Layout(4, PP2 | EP2 | CP2),
    "TP2+SP+EP2+CP2, experts cut": Layout(4, TP2 | EP2 | CP2 | {"expert_tensor_parallel_size": 2}),
}
BALANCED = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.02}
"""So large that router losses and the loss of the labels both count in the gradient."""
LOSSES = {"moe_aux_loss_coeff": 20.0, "moe_z_loss_coeff": 0.5}
"""So large that they make up most of the gradient: what is left of a difference of gradients is theirs."""
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def theirs(ranks: RankPool, tiny_qwen3_vl_moe: Path) -> model_harness.Result:
    return ranks.run(run_transformers, tiny_qwen3_vl_moe, MIXED, num_ranks=1)[0]


@pytest.mark.parametrize(
    ("cp_size", "packing", "microbatches"),
    [(1, True, len(MIXED)), (1, False, 2), (2, True, 2), (2, False, 1), (4, True, 1)],
    ids=["CP1, row by row", "CP1, padded", "CP2, packed", "CP2, padded", "CP4, packed"],
)
def test_rows_equal_transformers(
    ranks: RankPool, tiny_qwen3_vl_moe: Path, theirs: model_harness.Result, cp_size: int, packing: bool, microbatches: int
) -> None:
    for result in ranks.run(run_ours, tiny_qwen3_vl_moe, MIXED, cp_size, packing, microbatches, num_ranks=cp_size):
        check(result, theirs)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl_moe: Path) -> Result:
    return measure_layout(ranks, tiny_qwen3_vl_moe, Layout(1, BALANCED))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_qwen3_vl_moe: Path, one_rank: Result) -> None:
    """Router losses included."""
    layout = Layout(LAYOUTS[name].num_ranks, LAYOUTS[name].keys | BALANCED)
    for result in measure_layout(ranks, tiny_qwen3_vl_moe, layout):
        found = [differences(got, expected) for got, expected in ((result.packed, one_rank.packed), (result.padded, one_rank.padded))]
        print(name, *found)
        assert [over_bounds(one) for one in found] == [{}, {}]
        assert result.packed.router_losses == pytest.approx(one_rank.packed.router_losses, rel=RELATIVE)
        assert weight_difference(result, one_rank) <= WEIGHT_BOUND


def test_router_losses_are_those_of_a_naive_loop_however_many_tokens_are_labelled(
    ranks: RankPool, tiny_qwen3_vl_moe: Path, one_rank: Result
) -> None:
    """What they add to the gradients of a global batch, and their means in the log."""
    expected, means = ranks.run(reference, tiny_qwen3_vl_moe, PACKS, tuple(LOSSES.values()), num_ranks=1)[0]
    fewer = tuple(Pack(pack.mixes, labelled=0.35) for pack in PACKS)
    uneven = (PACKS[0], Pack(PACKS[1].mixes, labelled=0.1))
    batches = (PACKS, fewer, uneven)
    with_losses, without = (ranks.run(gradients_of_batches, tiny_qwen3_vl_moe, keys, batches, num_ranks=1)[0] for keys in (LOSSES, {}))
    for (whole, logged), (of_labels, nothing) in zip(with_losses, without, strict=True):
        assert nothing is None and logged == pytest.approx(means, rel=RELATIVE)
        added = {name: whole[name] - gradient for name, gradient in of_labels.items()}
        assert broken(added, expected, 1e-4) == {}
    assert one_rank.packed.router_losses == pytest.approx(means, rel=RELATIVE)


def broken(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> dict[str, float]:
    """The gradients that differ too much."""
    return {name: excess for name, excess in gradient_excess(got, expected, relative).items() if not excess <= 1}


@pytest.mark.parametrize("router_dtype", ["fp32", None])
def test_a_bfloat16_model_routes_in_float32_where_asked_and_else_as_transformers_does(ranks: RankPool, router_dtype: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TH, weight_EH = (torch.randn(size, 32, generator=generator).bfloat16() for size in (200, 16))
    in_float32 = ranks.run(routed_by_transformers, hidden_TH.float(), weight_EH.float(), 4, num_ranks=1)[0]
    in_bfloat16 = ranks.run(routed_by_transformers, hidden_TH, weight_EH, 4, num_ranks=1)[0]
    assert not torch.equal(in_float32[1], in_bfloat16[1])  # some token goes to another expert
    weights_TE, chosen_TE = ranks.run(routed, hidden_TH, weight_EH, 4, router_dtype, num_ranks=1)[0]
    expected = in_float32 if router_dtype else in_bfloat16
    assert torch.equal(chosen_TE, expected[1])
    torch.testing.assert_close(weights_TE, expected[0], rtol=1e-5 if router_dtype else 2**-7, atol=0)  # 2**-7: the last bit of bfloat16


@pytest.mark.parametrize(
    ("frozen", "mode"),
    [
        ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}),
        (
            {"freeze_vit": True, "freeze_aligner": True},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
    ],
    ids=["selective", "full, tower frozen"],
)
def test_recomputation_leaves_gradients_as_they_are(
    frozen: dict[str, bool], mode: dict[str, Any], ranks: RankPool, tiny_qwen3_vl_moe: Path
) -> None:
    keys = LAYOUTS["EP2+CP2"].keys | LOSSES | frozen
    expected, got = ranks.run(gradients_of_modes, tiny_qwen3_vl_moe, keys, [{}, mode], num_ranks=2)[0]
    assert broken(got, expected, RELATIVE) == {}


def test_weights_round_trip_equal_to_the_bit(ranks: RankPool, tiny_qwen3_vl_moe: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["PP2+EP2+CP2"]
    ranks.run(export_untrained, tiny_qwen3_vl_moe, tmp_path / "out", layout.keys, num_ranks=layout.num_ranks)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(tiny_qwen3_vl_moe))


def test_the_transposed_experts_of_older_checkpoints_are_read(ranks: RankPool, tiny_qwen3_vl_moe: Path, tmp_path: Path) -> None:
    """And written as `save_pretrained` writes them today."""
    older = tmp_path / "older"
    older.mkdir()
    for path in tiny_qwen3_vl_moe.iterdir():
        if path.suffix != ".safetensors":
            (older / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_qwen3_vl_moe / "model.safetensors")
    turned = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, older / "model.safetensors", metadata={"format": "pt"})
    layout = LAYOUTS["TP2+SP+EP2+CP2, experts cut"]
    ranks.run(export_untrained, older, tmp_path / "out", layout.keys, num_ranks=layout.num_ranks)
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(tiny_qwen3_vl_moe))
