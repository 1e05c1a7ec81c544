"""A row that one rank alone cannot decode is padding on all ranks, on record once, and too many of them end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool


def _streams(folder: Path, broken_on: int, cp_size: int) -> list[tuple[tuple[int, ...], list[int], int, int]]:
    """(rows, rows that are padding, labels, tokens) of each micro-batch of an epoch, where one rank finds b.png broken."""
    from unittest import mock

    import torch.distributed as dist

    from swiftcp.data import visuals
    from swiftcp.data.dataset import load_dataset
    from swiftcp.data.loader import BatchLayout, BatchStream
    from swiftcp.data.media import MediaError, read_image
    from swiftcp.data.plan import StepPlan
    from swiftcp.trainers.bad_rows import BadRowsOfRanks
    from tests.unit.data_fixtures import encoder

    def read(source: Any, *others: Any) -> Any:
        if dist.get_rank() == broken_on and source == "b.png":
            raise MediaError("image b.png cannot be read (too late): replace the file")
        return read_image(source, *others)

    dataset = load_dataset([folder / "rows.jsonl"], encoder(), strict=False, check_media=False)
    layout = BatchLayout(dist.get_rank() // cp_size, dist.get_world_size() // cp_size, 1, 256, 8)
    plan = StepPlan(dataset.lengths, seed=1, global_batch_size=2, packing_length=256, pack_align=8, num_train_epochs=2)
    with mock.patch.object(visuals, "read_image", read):
        batches = list(BatchStream(dataset, plan, layout, agree=BadRowsOfRanks(folder / "out", len(dataset))))
    return [(batch.rows, sorted(batch.bad_rows), batch.num_labels, batch.num_tokens) for batch in batches]


def test_one_rank_cannot_decode_a_row(ranks: RankPool, tmp_path: Path) -> None:
    from swiftcp.trainers.bad_rows import read_bad_rows, write_bad_rows
    from tests.unit.data_fixtures import chat, picture, write_jsonl

    for name in ("a", "b"):
        picture(96, 64).save(tmp_path / f"{name}.png")
    rows = [chat("hello " * 30) for _ in range(12)]
    rows += [chat("<image>?", images=["a.png"]), chat("<image>?", images=["b.png"]), chat("<image><image>", images=["a.png", "b.png"])]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "out").mkdir()
    whole = ranks.run(_streams, tmp_path, -1, 2, num_ranks=2)
    found = ranks.run(_streams, tmp_path, 1, 2, num_ranks=2)
    assert found[0] == found[1] and whole[0] == whole[1]
    assert [batch[0] for batch in found[0]] == [batch[0] for batch in whole[0]], "the plan does not move"
    assert sorted(row for batch in found[0] for row in batch[1]) == [13, 13, 14, 14]
    assert all((one[2:] == two[2:]) == (not one[1]) for one, two in zip(found[0], whole[0], strict=True))
    recorded = read_bad_rows(tmp_path / "out")
    assert [(row.line, row.kind) for row in recorded] == [(14, "decode"), (15, "decode")] or [row.line for row in recorded] == [15, 14]
    write_bad_rows(tmp_path / "out", (), keep_decoded=True)
    assert read_bad_rows(tmp_path / "out") == recorded
    write_bad_rows(tmp_path / "out", (), keep_decoded=False)
    assert read_bad_rows(tmp_path / "out") == []


def _too_many(folder: Path) -> str:
    from swiftcp.data.rows import BadRow
    from swiftcp.errors import DataError
    from swiftcp.trainers.bad_rows import BadRowsOfRanks

    agree = BadRowsOfRanks(folder, 3)
    assert agree({1: BadRow("d.jsonl", 2, "why", "decode")}).keys() == {1}
    with pytest.raises(DataError) as caught:
        agree({2: BadRow("d.jsonl", 3, "why", "decode")})
    return str(caught.value)


def test_too_many_rows_that_cannot_be_decoded_end_the_run(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_too_many, tmp_path, num_ranks=2) == ["2 of 3 rows could not be decoded, more than 50%: see bad_rows.jsonl"] * 2
