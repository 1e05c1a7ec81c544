"""Adapters: PEFT on `transformers` gives what we give, every layout gives what one rank gives, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layout_harness import LAYOUTS, PACKS, Differences, Measurement, differences, over_bounds
from tests.distributed.lora_harness import measure_adapter, measure_peft, write_random_adapter
from tests.distributed.ranks import RankPool


@pytest.fixture(scope="module")
def adapter(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every linear layer, beside an aligner that is trained whole."""
    output = tmp_path_factory.mktemp("lora") / "adapter"
    ranks.run(write_random_adapter, tiny_qwen3_vl, output, {"modules_to_save": ["aligner"]}, num_ranks=1)
    return output


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path) -> Measurement:
    return ranks.run(measure_adapter, tiny_qwen3_vl, adapter, {}, PACKS, num_ranks=1)[0]


def test_peft_gives_the_same_losses_and_gradients(ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, one_rank: Measurement) -> None:
    expected = ranks.run(measure_peft, tiny_qwen3_vl, adapter, PACKS, num_ranks=1)[0]
    found = differences(one_rank, expected)
    print(found)
    assert over_bounds(found) == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, one_rank: Measurement) -> None:
    layout = LAYOUTS[name]
    found: list[Differences] = []
    for result in ranks.run(measure_adapter, tiny_qwen3_vl, adapter, layout.keys, PACKS, num_ranks=layout.num_ranks):
        found.append(differences(result, one_rank))
    print(name, found[0])
    assert [over_bounds(one) for one in found] == [{}] * layout.num_ranks
