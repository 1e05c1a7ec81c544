"""The rules of the name table on literal integers, in both directions, whole and cut for tensor parallelism."""

import pytest
import torch

from swiftcp.checkpoint.name_table import Direct, FusedExperts, FusedGateUpExperts, GateUp, NameTable, QueryKeyValue, VocabularyRows
from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table
from tests.unit import folders


def rows(*numbers: int) -> torch.Tensor:
    """One column: row i holds numbers[i]."""
    return torch.tensor(numbers).unsqueeze(1)


QKV = QueryKeyValue(("q", "k", "v"), ("qkv",), parallel_dim=0, num_groups=2, head_dim=2)
GATE_UP = GateUp(("gate", "up"), ("fc1",), parallel_dim=0)
PADDED = VocabularyRows(("embedding",), ("embedding",), parallel_dim=0, num_rows=3)


def test_query_key_value_go_group_by_group():
    # Two groups, two query heads of two values each: rows 0-3 of q belong to the first group.
    query, key, value = rows(0, 1, 2, 3, 4, 5, 6, 7), rows(10, 11, 12, 13), rows(20, 21, 22, 23)
    joined = QKV.join([query, key, value], (16, 1))
    assert joined.flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert all(torch.equal(a, b) for a, b in zip(QKV.separate(joined), (query, key, value), strict=True))
    assert QKV.shard(joined, 1, 2).flatten().tolist() == [4, 5, 6, 7, 12, 13, 22, 23]
    assert QKV.source_shapes((16, 5)) == [(8, 5), (4, 5), (4, 5)]


def test_query_key_value_biases_have_one_dim():
    joined = QKV.join([torch.arange(8), torch.arange(10, 14), torch.arange(20, 24)], (16,))
    assert joined.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert QKV.source_shapes((16,)) == [(8,), (4,), (4,)]


def test_gate_comes_before_up_and_each_rank_has_a_part_of_both():
    joined = GATE_UP.join([rows(0, 1, 2, 3), rows(10, 11, 12, 13)], (8, 1))
    assert joined.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [part.flatten().tolist() for part in GATE_UP.separate(joined)] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert [GATE_UP.shard(joined, rank, 2).flatten().tolist() for rank in (0, 1)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_vocabulary_is_padded_with_zero_rows_and_trimmed():
    joined = PADDED.join([rows(7, 8, 9)], (4, 1))
    assert joined.flatten().tolist() == [7, 8, 9, 0]
    assert PADDED.separate(joined)[0].flatten().tolist() == [7, 8, 9]
    assert PADDED.shard(joined, 1, 2).flatten().tolist() == [9, 0]
    assert PADDED.whole_shape((2, 5), 2) == (4, 5)


def test_direct_is_cut_along_its_own_dim_only():
    weight = torch.arange(8).view(2, 4)
    assert Direct(("a",), ("b",), parallel_dim=1).shard(weight, 1, 2).tolist() == [[2, 3], [6, 7]]
    assert Direct(("a",), ("b",)).shard(weight, 1, 2) is weight
    assert Direct(("a",), ("b",)).whole_shape((2, 4), 2) == (2, 4)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (QKV, (16, 1)),
        (GATE_UP, (8, 1)),
        (PADDED, (4, 1)),
        (VocabularyRows(("embedding",), ("embedding",), parallel_dim=0, num_rows=1), (4, 1)),
        (Direct(("a",), ("b",), parallel_dim=1), (2, 4)),
        (Direct(("a",), ("b",)), (2, 4)),
    ],
)
def test_parts_of_the_sources_join_to_the_part_of_a_rank(rule, shape):
    """The two ways to a rank's part are one: cut the sources and join, or join and cut."""
    sources = [torch.arange(torch.Size(part).numel()).view(part) + 100 * i for i, part in enumerate(rule.source_shapes(shape))]
    whole = rule.join(sources, shape)
    assert torch.equal(rule.unshard([rule.shard(whole, rank, 2) for rank in (0, 1)]), whole)
    for rank in (0, 1):
        expected = rule.shard(whole, rank, 2)
        local = rule.local(expected.shape, rank, 2)
        parts = [source[index] for source, index in zip(sources, rule.source_slices(expected.shape, rank, 2), strict=True)]
        assert torch.equal(local.join(parts, expected.shape), expected)
        assert all(torch.equal(one, other) for one, other in zip(local.separate(expected), parts, strict=True))


def test_slices_of_a_rank_name_its_groups_and_rows_alone():
    assert QKV.source_slices((8, 5), 1, 2) == [(slice(4, 8),), (slice(2, 4),), (slice(2, 4),)]
    assert PADDED.source_slices((2, 5), 1, 2) == [(slice(2, 3),)]
    assert Direct(("a",), ("b",), parallel_dim=1).source_slices((2, 2), 1, 2) == [(slice(None), slice(2, 4))]
    assert QKV.source_slices((16, 5), 0, 1) == [(), (), ()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_vl_pairs_every_parameter_with_every_tensor(tied, fused):
    rules = qwen3_vl_name_table(folders.config(tied)).pair(list(folders.model(tied, fused).state_dict()))
    assert sorted(name for rule in rules.values() for name in rule.sources) == sorted(folders.tensors(tied))


def test_a_parameter_without_a_rule_is_a_bug():
    with pytest.raises(AssertionError, match=r"no rule for \['language_model.new.weight'\]"):
        qwen3_vl_name_table(folders.config()).pair(["language_model.new.weight"])


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("model.visual.pos_embed.weight", "model.visual.pos_embed.weight"),
        ("visual.pos_embed.weight", "model.visual.pos_embed.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.other.weight", "model.other.weight"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_older_names_are_those_with_or_without_the_base_prefix(stored, expected, tied):
    table = NameTable(rules=(), num_layers=0, tied={"lm_head.weight": "embedding"} if tied else {}, base_prefix="model.")
    sources = {"model.visual.pos_embed.weight"} | (set() if tied else {"lm_head.weight"})
    assert table.canonical_name(stored, sources) == expected


GATE_UP_EXPERTS = FusedGateUpExperts(
    ("{layer}.gate_up",) * 2, ("{layer}.{expert}.fc1", "{layer}.fc1{expert}"), parallel_dim=0, num_experts=3
)
DOWN_EXPERTS = FusedExperts(("{layer}.down",), ("{layer}.{expert}.fc2",), parallel_dim=1, num_experts=3)
TABLE = NameTable(rules=(GATE_UP_EXPERTS, DOWN_EXPERTS), num_layers=2, tied={}, base_prefix="")


def test_each_expert_of_each_layer_has_its_part_of_one_tensor():
    rules = TABLE.pair(["1.2.fc1", "0.fc11", "1.0.fc2"])
    assert [rule.sources[0] for rule in rules.values()] == ["1.gate_up", "0.gate_up", "1.down"]
    assert [rule.expert for rule in rules.values()] == [2, 1, 0]
    # [3 experts, 4 rows of gate and 4 of up, 1]: the second of two ranks has the last two rows of each.
    fused = torch.arange(24).view(3, 8, 1)
    parts = [fused[index] for index in rules["1.2.fc1"].source_slices((4, 1), 1, 2)]
    assert rules["1.2.fc1"].join(parts, (4, 1)).flatten().tolist() == [18, 19, 22, 23]
    assert rules["1.2.fc1"].source_shapes((8, 1)) == [(3, 8, 1)] * 2
    down = torch.arange(12).view(3, 1, 4)
    (part,) = (down[index] for index in rules["1.0.fc2"].source_slices((1, 2), 1, 2))
    assert rules["1.0.fc2"].join([part], (1, 2)).tolist() == [[2, 3]]


def test_experts_come_together_again_in_one_tensor():
    experts = {f"0.{expert}.fc1": torch.arange(4).view(4, 1) + 10 * expert for expert in (2, 0, 1)}
    (fused,) = TABLE.to_sources(experts).values()
    assert fused.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    shards = [GATE_UP_EXPERTS.shard(experts["0.2.fc1"], rank, 2) for rank in (0, 1)]
    assert [shard.flatten().tolist() for shard in shards] == [[20, 22], [21, 23]]
    assert torch.equal(GATE_UP_EXPERTS.unshard(shards), experts["0.2.fc1"])
