"""Qwen3-VL-MoE: against `transformers` row by row, layouts against one rank, router losses against a naive loop, weights there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.layout_harness import (
    ONE_RANK,
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
from tests.distributed.moe_harness import export_untrained, gradients, reference
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
LOSSES = {"moe_aux_loss_coeff": 20.0, "moe_z_loss_coeff": 0.5}
"""So large that they make up most of the gradient: what is left of a difference of gradients is theirs."""
RELATIVE = 1e-5


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_mixed_batch_equals_transformers(ranks: RankPool, tiny_qwen3_vl_moe: Path, packing: bool, cp_size: int) -> None:
    expected = ranks.run(run_transformers, tiny_qwen3_vl_moe, MIXED, num_ranks=1)[0]
    for result in ranks.run(run_ours, tiny_qwen3_vl_moe, MIXED, cp_size, packing, 2, num_ranks=cp_size):
        check(result, expected)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl_moe: Path) -> Result:
    return measure_layout(ranks, tiny_qwen3_vl_moe, ONE_RANK)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_qwen3_vl_moe: Path, one_rank: Result) -> None:
    for result in measure_layout(ranks, tiny_qwen3_vl_moe, LAYOUTS[name]):
        found = [differences(got, expected) for got, expected in ((result.packed, one_rank.packed), (result.padded, one_rank.padded))]
        print(name, *found)
        assert [over_bounds(one) for one in found] == [{}, {}]
        assert weight_difference(result, one_rank) <= WEIGHT_BOUND


def router_part(ranks: RankPool, folder: Path, packs: tuple[Pack, ...]) -> dict[str, torch.Tensor]:
    """What the router losses add to the gradients of a global batch, on one rank."""
    (with_losses, _), (without, losses) = (ranks.run(gradients, folder, keys, packs, num_ranks=1)[0] for keys in (LOSSES, {}))
    assert losses is None
    return {name: with_losses[name] - gradient for name, gradient in without.items()}


def test_router_losses_are_those_of_a_naive_loop_however_many_tokens_are_labelled(ranks: RankPool, tiny_qwen3_vl_moe: Path) -> None:
    expected, _ = ranks.run(reference, tiny_qwen3_vl_moe, PACKS, tuple(LOSSES.values()), num_ranks=1)[0]
    fewer = tuple(Pack(pack.mixes, labelled=0.35) for pack in PACKS)
    uneven = (PACKS[0], Pack(PACKS[1].mixes, labelled=0.1))
    for packs in (PACKS, fewer, uneven):
        excess = gradient_excess(router_part(ranks, tiny_qwen3_vl_moe, packs), expected, 1e-4)
        assert {name: value for name, value in excess.items() if not value <= 1} == {}


@pytest.mark.parametrize("name", ["TP2+SP", "PP2", "EP2", "EP2+CP2", "PP2+EP2+CP2"])
def test_router_losses_do_not_depend_on_the_layout(name: str, ranks: RankPool, tiny_qwen3_vl_moe: Path) -> None:
    _, means = ranks.run(reference, tiny_qwen3_vl_moe, PACKS, tuple(LOSSES.values()), num_ranks=1)[0]
    expected, logged = ranks.run(gradients, tiny_qwen3_vl_moe, LOSSES, PACKS, num_ranks=1)[0]
    assert logged == pytest.approx(means, rel=1e-5)
    for got, of_layout in ranks.run(gradients, tiny_qwen3_vl_moe, LAYOUTS[name].keys | LOSSES, PACKS, num_ranks=LAYOUTS[name].num_ranks):
        assert of_layout == pytest.approx(means, rel=1e-5)
        assert {tensor: value for tensor, value in gradient_excess(got, expected, RELATIVE).items() if not value <= 1} == {}


RECOMPUTE = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
]


@pytest.mark.parametrize("frozen", [{}, {"freeze_vit": True, "freeze_aligner": True}], ids=["nothing", "tower"])
def test_recomputation_leaves_gradients_as_they_are(frozen: dict[str, bool], ranks: RankPool, tiny_qwen3_vl_moe: Path) -> None:
    expected, *others = ranks.run(
        gradients_of_modes, tiny_qwen3_vl_moe, LAYOUTS["EP2+CP2"].keys | LOSSES | frozen, [{}, *RECOMPUTE], num_ranks=2
    )[0]
    for got in others:
        assert {tensor: value for tensor, value in gradient_excess(got, expected, RELATIVE).items() if not value <= 1} == {}


@pytest.mark.parametrize("name", ["EP2", "PP2+EP2+CP2", "TP2+SP+EP2+CP2, experts cut"])
def test_weights_round_trip_equal_to_the_bit(name: str, ranks: RankPool, tiny_qwen3_vl_moe: Path, tmp_path: Path) -> None:
    ranks.run(export_untrained, tiny_qwen3_vl_moe, tmp_path / "out", LAYOUTS[name].keys, num_ranks=LAYOUTS[name].num_ranks)
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
