"""`swiftcp logprobs` writes what `transformers` computes, in any layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.loop_harness import run_logprobs
from tests.distributed.ranks import RankPool
from tests.media_rows import write_media_rows

TOLERANCE = 1e-5
"""Absolute, of a log-probability in float32."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp4": (4, {"context_parallel_size": 4}),
    "cp2_dp2": (4, {"context_parallel_size": 2}),
    "padded_rows": (2, {"packing": False, "micro_batch_size": 2}),
    "padded_rows_cp2": (2, {"packing": False, "micro_batch_size": 3, "context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_rows(tmp_path_factory.mktemp("media"))


def oracle_rows(model_folder: Path, rows: Path) -> list[dict[str, Any]]:
    """Each row alone through `transformers`, in the form that is written."""
    from swiftcp.data.dataset import load_dataset
    from swiftcp.data.encode import RowEncoder
    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs
    from swiftcp.trainers.setup import load_source

    source = load_source(model_folder)
    dataset = load_dataset([rows], RowEncoder(source.processor, partial(source.family.position_ids, source.hf_config)))
    model = load_oracle(model_folder, source.family, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        return [
            {
                "row": sample.row,
                "input_ids": sample.input_ids_L.tolist(),
                "labels": sample.labels_L.tolist(),
                "logprobs": oracle_logprobs(model, sample).tolist(),
            }
            for sample in (dataset[place] for place in range(len(dataset)))
        ]


@pytest.fixture(scope="module")
def expected(ranks: RankPool, tiny_qwen3_vl: Path, rows: Path) -> list[dict[str, Any]]:
    return ranks.run(oracle_rows, tiny_qwen3_vl, rows, num_ranks=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_transformers(
    layout: str, ranks: RankPool, tiny_qwen3_vl: Path, rows: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    num_ranks, changes = LAYOUTS[layout]
    output = tmp_path / "new folder" / "logprobs.jsonl"
    longest = max(len(row["input_ids"]) for row in expected)
    lengths = {"max_length": -(-longest // 64) * 64, "packing_length": -(-longest // 64) * 128}
    if not changes.get("packing", True):
        del lengths["packing_length"]
    values = {"model": str(tiny_qwen3_vl), "dataset": [str(rows)], "output": str(output), **lengths, **changes}
    ranks.run(run_logprobs, values, num_ranks=num_ranks)
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [path.name for path in output.parent.iterdir()] == ["logprobs.jsonl"]
    assert len(got) == len(expected) > 4
    for ours, theirs in zip(got, expected, strict=True):
        assert {key: ours[key] for key in ("row", "input_ids", "labels")} == {key: theirs[key] for key in ("row", "input_ids", "labels")}
        assert ours["logprobs"][0] is None
        assert torch.tensor(ours["logprobs"][1:]).sub(torch.tensor(theirs["logprobs"])).abs().max() <= TOLERANCE


def test_labels_are_those_of_the_mode(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    values = {"model": str(tiny_qwen3_vl), "dataset": [str(file)], "output": str(tmp_path / "out.jsonl"), "max_length": 64, "mode": "pt"}
    ranks.run(run_logprobs, values, num_ranks=1)
    [row] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert row["labels"] == row["input_ids"] and len(row["logprobs"]) == len(row["labels"])
