"""Pipeline stages and virtual stages beyond equal gradients (test_layouts.py): checkpoints, whole runs, what a stage reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint_harness import Recipe, Record, run
from tests.distributed.layout_harness import CHUNKS
from tests.distributed.loop_harness import logged, run_logprobs, run_sft
from tests.distributed.ranks import RankPool
from tests.media_rows import write_media_rows

STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_rows(tmp_path_factory.mktemp("rows"))


class AnyLayout(Recipe):
    """A recipe whose layout a checkpoint may leave."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {}


def shown(records: Sequence[Record]) -> list[float]:
    return [float.fromhex(value) for record in records for value in (record.loss, record.grad_norm)]


def train(ranks: RankPool, folder: Path, output: Path, until: int, values: dict[str, Any]) -> list[Record]:
    recipe = AnyLayout(values={**values, "vit_lr": 3e-4})
    return ranks.run(run, folder, output, until, recipe, num_ranks=2 if values else 1)[0]


@pytest.mark.parametrize(("before", "after"), [(CHUNKS, {}), ({}, STAGES)], ids=["vpp-one", "one-pp2"])
def test_a_checkpoint_moves_between_stages(
    before: dict[str, Any], after: dict[str, Any], ranks: RankPool, eight_layers: Path, tmp_path: Path
) -> None:
    """Keys of tensors know neither chunks nor stages; a tied embedding is saved once."""
    expected = shown(train(ranks, eight_layers, tmp_path / "one", 4, {}))[4:]
    train(ranks, eight_layers, tmp_path / "moved", 2, before)
    found = shown(train(ranks, eight_layers, tmp_path / "moved", 4, after))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_run_over_chunks_gives_what_one_rank_gives(ranks: RankPool, eight_layers: Path, rows: Path, tmp_path: Path) -> None:
    """Packs, filler micro-batches (5 packs on groups of 2), evaluation and the exported weights."""
    fixed = {
        "model": str(eight_layers),
        "dataset": [str(rows)],
        "val_dataset": [str(rows)],
        "packing_length": 192,
        "torch_dtype": "float32",
    }
    fixed |= {"global_batch_size": 4, "train_iters": 2, "eval_steps": 1, "eval_iters": -1, "save_steps": 2, "lr": 1e-3}
    for name, layout, num_ranks in (("one", {}, 1), ("chunks", CHUNKS, 2)):
        assert ranks.run(run_sft, {**fixed, **layout, "output_dir": str(tmp_path / name)}, num_ranks=num_ranks) == ["done"] * num_ranks
    one, chunks = (logged(tmp_path / name) for name in ("one", "chunks"))
    for key in ("loss", "grad_norm", "eval_loss", "labelled_tokens", "tokens", "pack_fill"):
        assert [record[key] for record in chunks] == pytest.approx([record[key] for record in one], rel=1e-5), key


def run_without_decoding(values: dict[str, Any]) -> None:
    """On each rank: log-probabilities; ranks behind the first cannot decode."""
    from unittest import mock

    import torch.distributed as dist

    from swiftcp.data.visuals import Visuals

    def decode(*_: Any) -> Any:
        raise AssertionError("a later stage decodes media")

    with mock.patch.object(Visuals, "patches", decode) if dist.get_rank() else mock.MagicMock():
        run_logprobs(values)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_later_stages_decode_no_media(packing: bool, ranks: RankPool, eight_layers: Path, rows: Path, tmp_path: Path) -> None:
    import json

    values = {"model": str(eight_layers), "dataset": [str(rows)], "packing": packing, "micro_batch_size": 1 if packing else 2}
    values |= {"packing_length": 256} if packing else {}
    for name, layout, num_ranks in (("one", {}, 1), ("stages", STAGES, 2), ("chunks", CHUNKS, 2)):
        ranks.run(run_without_decoding, {**values, **layout, "output": str(tmp_path / name)}, num_ranks=num_ranks)
    one, *others = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("one", "stages", "chunks"))
    for other in others:
        assert [row["row"] for row in other] == [row["row"] for row in one]
        for got, expected in zip(other, one, strict=True):
            assert got["logprobs"][1:] == pytest.approx(expected["logprobs"][1:], rel=1e-5, abs=1e-5)
