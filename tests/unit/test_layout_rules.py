"""Rules about the parallel layout: the model of these tests has 8 layers, 4 heads, 2 key/value heads and 2 deepstack levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftcp.config import Machine, ResolvedConfig, TrainConfig
from swiftcp.errors import ConfigError
from tests.unit.config_fixtures import valid, write_model, write_rows

VPP = "virtual_pipeline_model_parallel_size"


def resolved(folder: Path, keys: str, world_size: int) -> ResolvedConfig[TrainConfig]:
    write_model(folder / "model", num_hidden_layers=8)
    write_rows(folder / "rows.jsonl")
    return valid(folder, *keys.split(), machine=Machine(world_size, world_size, 0))


def derived(folder: Path, keys: str, world_size: int) -> str:
    """The first derived line of a valid layout."""
    return resolved(folder, keys, world_size).derived[0]


@pytest.mark.parametrize(
    ("keys", "world_size", "line"),
    [
        ("-tp 2", 4, "world 4 = tp 2 x cp 1 x dp 2"),
        ("-tp 2 --sequence_parallel true -cp 2", 4, "world 4 = tp 2 x cp 2 x dp 1"),
        ("-pp 2 -cp 2", 4, "world 4 = pp 2 x cp 2 x dp 1"),
        (f"-pp 2 --{VPP} 2", 2, "world 2 = pp 2 x cp 1 x dp 1"),
        ("-pp 3 --decoder_first_pipeline_num_layers 2", 3, "world 3 = pp 3 x cp 1 x dp 1"),
        ("-pp 3 --decoder_first_pipeline_num_layers 4 --decoder_last_pipeline_num_layers 1", 3, "world 3 = pp 3 x cp 1 x dp 1"),
    ],
)
def test_layouts_that_fit(tmp_path, keys, world_size, line):
    assert derived(tmp_path, keys, world_size) == line


@pytest.mark.parametrize(
    ("keys", "world_size", "message"),
    [
        ("-tp 2 -pp 2", 6, "world 6 is no multiple of tensor_model_parallel_size 2 x pipeline_model_parallel_size 2 = 4: start 8 ranks"),
        ("-cp 2", 3, "world 3 is no multiple of context_parallel_size 2: start 4 ranks"),
        ("-tp 4", 4, "num_key_value_heads 2 of the model is no multiple of tensor_model_parallel_size 4: set it to a divisor of 2"),
        ("-pp 3", 3, "num_hidden_layers 8 of the model do not spread evenly over pipeline_model_parallel_size 3: set"),
        ("-pp 2 --decoder_first_pipeline_num_layers 8", 2, "do not spread evenly"),
        (f"-pp 2 --{VPP} 3", 2, f"a pipeline stage of 4 layers is no multiple of {VPP} 3: set a divisor"),
        (f"--{VPP} 2", 1, f"{VPP} 2 needs pipeline stages, but pipeline_model_parallel_size is 1"),
        ("-pp 8", 8, "(deepstack), which must be in that chunk: set decoder_first_pipeline_num_layers to 2 or more"),
        (f"-pp 2 --{VPP} 4", 2, "set decoder_first_pipeline_num_layers to 8 or more, or fewer stages"),
        (f"-pp 2 --{VPP} 2 --global_batch_size 3", 2, "global_batch_size 3 is 3 micro-batches of a rank, no multiple of"),
        ("-cp 4 --cp_comm_type a2a+p2p", 4, "needs the size of the inner (a2a) and the outer (p2p) groups: set hierarchical"),
        (
            "-cp 4 --cp_comm_type a2a+p2p --hierarchical_context_parallel_sizes 4 2",
            4,
            "[4, 2] are not two sizes whose product is context_parallel_size 4: set",
        ),
        ("-tp 2 -cp 2 --cp_comm_type a2a", 4, "no multiple of tensor_model_parallel_size 2 x context_parallel_size 2, as cp_comm_type a2a"),
        (
            "-tp 2 --sequence_parallel true --pack_align 1 --packing_length 1001 -cp 1",
            2,
            "packing_length 1001 does not spread evenly over tensor_model_parallel_size 2",
        ),
    ],
)
def test_layouts_that_do_not_fit(tmp_path, keys, world_size, message):
    with pytest.raises(ConfigError) as caught:
        derived(tmp_path, keys, world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "world_size", "axes"),
    [
        ("-tp 2 --sequence_parallel true -cp 2", 4, None),
        ("-tp 2 -pp 2 -cp 2", 8, "cp + pp + tp"),
        (f"-pp 2 --{VPP} 2", 4, "dp + pp + vpp"),
        ("-tp 2 --sequence_parallel true", 4, None),
    ],
)
def test_a_layout_that_no_test_compares_with_one_rank_warns(tmp_path, keys, world_size, axes):
    warnings = resolved(tmp_path, keys, world_size).warnings
    untested = [warning for warning in warnings if "not among the layouts that are tested" in warning]
    assert bool(untested) == (axes is not None)
    assert axes is None or axes in untested[0]


EXPERTS = dict(num_experts=8, moe_intermediate_size=96)
"""Of the model of the tests below."""


def with_experts(folder: Path, keys: str, world_size: int) -> ResolvedConfig[TrainConfig]:
    write_model(folder / "model", **EXPERTS)
    write_rows(folder / "rows.jsonl")
    return valid(folder, *keys.split(), machine=Machine(world_size, world_size, 0))


@pytest.mark.parametrize(
    ("keys", "world_size", "line", "fewest"),
    [
        ("-ep 4", 4, "world 4 = cp 1 x dp 4, experts over ep 4", 4),
        ("-ep 4 -cp 2", 4, "world 4 = cp 2 x dp 2, experts over ep 4", 4),
        ("-ep 2 -cp 2", 2, "world 2 = cp 2 x dp 1, experts over ep 2", 2),
        (
            "-tp 2 --sequence_parallel true -ep 2 -etp 3 -pp 2 --global_batch_size 18",
            12,
            "world 12 = tp 2 x pp 2 x cp 1 x dp 3, experts over ep 2 x etp 3",
            12,
        ),
    ],
)
def test_experts_are_spread_over_any_ranks_of_a_stage(tmp_path, keys, world_size, line, fewest):
    found = with_experts(tmp_path, keys, world_size)
    assert found.derived[0] == line and found.config.fewest_ranks == fewest


@pytest.mark.parametrize(
    ("keys", "world_size", "message"),
    [
        ("-ep 3", 3, "num_experts 8 of the model is no multiple of expert_model_parallel_size 3: set it to a divisor of 8"),
        ("-etp 5", 5, "moe_intermediate_size 96 of the model is no multiple of expert_tensor_parallel_size 5"),
        ("-ep 4 -cp 3", 3, "world 3 is no multiple of pp 1 x ep 4 x etp 1 = 4: start 12 ranks"),
        ("-tp 2", 2, "need each token on one rank: set sequence_parallel true"),
    ],
)
def test_experts_that_do_not_fit(tmp_path, keys, world_size, message):
    with pytest.raises(ConfigError) as caught:
        with_experts(tmp_path, keys, world_size)
    assert message in str(caught.value)


def test_keys_of_experts_do_not_go_with_a_dense_model(tmp_path):
    with pytest.raises(ConfigError, match="expert_model_parallel_size 2, but the model has no experts: leave it out"):
        resolved(tmp_path, "-ep 2", 2)
    warnings = resolved(tmp_path / "other", "--moe_aux_loss_coeff 0.001", 1).warnings
    assert any("moe_aux_loss_coeff has no effect: the model has no experts" in warning for warning in warnings)


def test_ranks_share_the_key_heads_of_delta_nets(tmp_path):
    write_model(tmp_path / "model", linear_num_key_heads=4)
    write_rows(tmp_path / "rows.jsonl")
    valid(tmp_path, "-cp", "4", machine=Machine(4, 4, 0))
    with pytest.raises(ConfigError, match="linear_num_key_heads 4 of the model is no multiple of tensor_model_parallel_size 1 x context_"):
        valid(tmp_path, "-cp", "8", machine=Machine(8, 8, 0))
