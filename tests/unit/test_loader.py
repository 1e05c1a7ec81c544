"""Scanning finds every bad row before training; streams give the plan's rows, whatever the workers, ranks and starting step."""

from __future__ import annotations

import itertools
import logging
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftcp.data.batch import IGNORED_LABEL, Batch
from swiftcp.data.dataset import BadRow, EncodedDataset, RowScan, load_dataset, scan_rows
from swiftcp.data.loader import BatchLayout, BatchStream, batches_in_order, mean_labels
from swiftcp.data.plan import StepPlan
from swiftcp.data.row_files import read_rows
from swiftcp.data.rows import RowError
from swiftcp.data.workers import map_in_order
from swiftcp.errors import ConfigError, DataError

from .data_fixtures import chat, encoder, picture, write_jsonl, write_video

NUM_ROWS = 11


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven rows of text, images and a video, of different lengths."""
    folder = tmp_path_factory.mktemp("data")
    picture(96, 64).save(folder / "a.png")
    write_video(folder / "v.mp4", num_frames=9)
    rows = [chat("hello " * (3 * number + 1), f"answer {number}") for number in range(NUM_ROWS - 3)]
    rows += [chat("<image>?", images=["a.png"]), chat("<image><image>?", images=["a.png"] * 2), chat("<video>?", videos=["v.mp4"])]
    return write_jsonl(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def dataset(data: Path) -> EncodedDataset:
    return load_dataset([data], encoder())


def layout(dp_rank: int = 0, dp_size: int = 1, **options: Any) -> BatchLayout:
    chosen = {"micro_batch_size": 1, "packing_length": 256, "pack_align": 8, **options}
    return BatchLayout(dp_rank, dp_size, **chosen)


def steps_of(dataset: EncodedDataset, chosen: BatchLayout, **options: Any) -> StepPlan:
    figures = {"seed": 3, "global_batch_size": 4, "num_train_epochs": 2, **options}
    return StepPlan(dataset.lengths, packing_length=chosen.packing_length, pack_align=chosen.pack_align, **figures)


def batches(dataset: EncodedDataset, chosen: BatchLayout, *, start_step: int = 0, num_workers: int = 0, **options: Any) -> list[Batch]:
    stream = BatchStream(dataset, steps_of(dataset, chosen, **options), chosen, start_step=start_step, num_workers=num_workers)
    return list(stream)


def equal(one: Batch, two: Batch) -> bool:
    visual = (
        one.visual is two.visual is None
        if one.visual is None or two.visual is None
        else (torch.equal(one.visual.patches_PD, two.visual.patches_PD) and torch.equal(one.visual.positions_V, two.visual.positions_V))
    )
    return (
        visual
        and (one.rows, one.lengths, one.max_seqlen) == (two.rows, two.lengths, two.max_seqlen)
        and torch.equal(one.input_ids_BS, two.input_ids_BS)
        and torch.equal(one.labels_BS, two.labels_BS)
        and torch.equal(one.position_ids_3BS, two.position_ids_3BS)
    )


def test_lengths_and_samples(dataset: EncodedDataset) -> None:
    assert len(dataset) == NUM_ROWS and dataset.dropped == ()
    assert [len(dataset[place]) for place in range(NUM_ROWS)] == list(dataset.lengths)
    assert [dataset[place].row for place in range(NUM_ROWS)] == list(range(NUM_ROWS))


def test_every_row_once_an_epoch(dataset: EncodedDataset) -> None:
    rows = Counter(row for batch in batches(dataset, layout()) for row in batch.rows)
    assert rows == Counter(dict.fromkeys(range(NUM_ROWS), 2))


def test_packs_of_a_stream_hold_their_rows(dataset: EncodedDataset) -> None:
    for batch in batches(dataset, layout()):
        assert batch.packed and batch.input_ids_BS.shape[1] <= 256
        begin = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            assert torch.equal(batch.input_ids_BS[0, begin : begin + length], dataset[row].input_ids_L)
            begin += -(-length // 8) * 8


@pytest.mark.parametrize("packing_length", [256, None])
def test_case_35_workers_and_resuming_change_nothing(dataset: EncodedDataset, packing_length: int | None) -> None:
    chosen = layout(packing_length=packing_length)
    whole = batches(dataset, chosen)
    with_workers = batches(dataset, chosen, num_workers=2)
    assert len(whole) == len(with_workers) and all(map(equal, whole, with_workers))
    resumed = batches(dataset, chosen, start_step=1)
    assert len(resumed) == len(whole) - 4 and all(map(equal, whole[4:], resumed))
    again = batches(dataset, chosen, start_step=len(whole) // 4)
    assert again == []


@pytest.mark.parametrize("packing_length", [256, None])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_share_the_batches_of_one_rank(dataset: EncodedDataset, dp_size: int, packing_length: int | None) -> None:
    """Step by step; which rank takes which is a matter of cost."""
    alone = batches(dataset, layout(packing_length=packing_length))
    ranks = [batches(dataset, layout(rank, dp_size, packing_length=packing_length)) for rank in range(dp_size)]
    together = [batch for same in zip(*ranks, strict=True) for batch in same]
    for expected, found in zip(itertools.batched(alone, 4), itertools.batched(together, 4), strict=True):
        assert all(map(equal, *(sorted(step, key=lambda batch: batch.rows) for step in (expected, found))))


def test_case_36_the_tail_is_filled(dataset: EncodedDataset) -> None:
    ranks = [batches(dataset, layout(rank, 3, packing_length=None, micro_batch_size=2), global_batch_size=6) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [4, 4, 4]
    assert [rank[-1].rows for rank in ranks][2] == ()
    assert all(batch.input_ids_BS.shape[0] == 2 for rank in ranks for batch in rank)
    filler = ranks[2][-1]
    assert (filler.labels_BS == IGNORED_LABEL).all() and filler.padding_mask_BS.all()
    assert Counter(row for rank in ranks for batch in rank for row in batch.rows) == Counter(dict.fromkeys(range(NUM_ROWS), 2))


def test_full_packs_have_one_shape(dataset: EncodedDataset) -> None:
    assert {batch.input_ids_BS.shape for batch in batches(dataset, layout(full_packs=True))} == {(1, 256)}
    double = batches(dataset, layout(full_packs=True, micro_batch_size=2))
    assert {batch.input_ids_BS.shape for batch in double} == {(1, 512)}
    assert Counter(row for batch in double for row in batch.rows) == Counter(dict.fromkeys(range(NUM_ROWS), 2))


def test_micro_batches_of_each_step(dataset: EncodedDataset) -> None:
    chosen = layout(1, 2)
    assert BatchStream(dataset, steps_of(dataset, chosen), chosen).num_micro_batches == 2
    with pytest.raises(ConfigError, match=r"global_batch_size 4 is no multiple of dp 3 x micro_batch_size 1 = 3"):
        BatchStream(dataset, steps_of(dataset, layout(1, 3)), layout(1, 3))


@pytest.mark.parametrize("packing_length", [256, None])
def test_in_order(dataset: EncodedDataset, packing_length: int | None) -> None:
    ranks = [list(batches_in_order(dataset, layout(rank, 2, packing_length=packing_length))) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    assert [row for same in zip(*ranks, strict=True) for batch in same for row in batch.rows] == list(range(NUM_ROWS))


@pytest.mark.parametrize("packing_length", [256, None])
def test_in_order_in_groups(dataset: EncodedDataset, packing_length: int | None) -> None:
    """As interleaved pipeline stages take them; the last may hold no row."""
    found = list(batches_in_order(dataset, layout(packing_length=packing_length, batch_multiple=4)))
    assert len(found) % 4 == 0 and [row for batch in found for row in batch.rows] == list(range(NUM_ROWS))


BAD = {
    2: ({"messages": [{"role": "usr", "content": "u"}]}, "message 1 has the role str 'usr'", "row"),
    4: (chat("<image>", images=["missing.png"]), "missing.png is no file", "media"),
    5: (chat("<image>", images=["cut.png"]), "image cut.png cannot be read", "media"),
    7: (chat("u " * 400), "max_length is 100", "length"),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows, four of them bad, on odd lines of a file."""
    folder = tmp_path_factory.mktemp("mixed")
    picture(96, 64).save(folder / "whole.png")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:900])
    path = write_jsonl(folder / "rows.jsonl", [BAD[number][0] if number in BAD else chat(f"u{number}") for number in range(10)])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    return path


def test_strict_lists_every_bad_row(mixed: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset([mixed], encoder(max_length=100))
    message = str(caught.value)
    assert message.startswith("4 of 10 rows are bad (mend them, or set strict to false")
    for number, (_, words, _) in BAD.items():
        assert f"{mixed}:{2 * number + 1}: " in message and words in message


def test_without_strict_bad_rows_are_dropped_and_counted(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="swiftcp.data.dataset"):
        dataset = load_dataset([mixed], encoder(max_length=100), strict=False)
    assert dataset.kept == (0, 1, 3, 6, 8, 9) and len(dataset) == 6
    assert [dataset[place].row for place in range(6)] == list(dataset.kept)
    assert [(row.line, row.kind) for row in dataset.dropped] == [(2 * number + 1, kind) for number, (_, _, kind) in BAD.items()]
    assert "4 of 10 rows are bad and left out (length: 1, media: 2, row: 1)" in caplog.text
    streamed = [row for batch in batches_in_order(dataset, layout()) for row in batch.rows]
    assert streamed == [0, 1, 3, 6, 8, 9]


def test_case_02_pixels_need_not_be_checked(mixed: Path) -> None:
    dataset = load_dataset([mixed], encoder(max_length=100), strict=False, check_media=False)
    assert 5 in dataset.kept
    with pytest.raises(RowError, match=r"rows.jsonl:11: image cut.png cannot be read"):
        dataset[dataset.kept.index(5)]


def test_row_22_a_row_that_cannot_be_decoded_is_padding_in_its_place(mixed: Path) -> None:
    dataset = load_dataset([mixed], encoder(max_length=100), strict=False, check_media=False)
    place = dataset.kept.index(5)
    chosen = layout(packing_length=128, pack_align=8)
    told: list[set[int]] = []

    def agree(bad: Any) -> Any:
        told.append(set(bad))
        return {**bad, 8: BadRow("elsewhere", 1, "another rank could not", "decode")}

    plan = steps_of(dataset, chosen, num_train_epochs=1)
    alone = list(BatchStream(dataset, plan, chosen, agree=lambda bad: bad))
    agreed = list(BatchStream(dataset, plan, chosen, agree=agree))
    assert [batch.rows for batch in alone] == [batch.rows for batch in agreed] and set().union(*told) == {5}
    for batch in agreed:
        for row, length, start in zip(batch.rows, batch.lengths, batch.cu_seqlens, strict=False):
            here = slice(int(start), int(start) + length)
            assert row not in (5, 8) or bool(batch.padding_mask_BS[0, here].all() and (batch.labels_BS[0, here] == IGNORED_LABEL).all())
            assert row in (5, 8) or not batch.padding_mask_BS[0, here].any()
    (bad,) = [bad for batch in alone for bad in batch.bad_rows.values()]
    assert (bad.line, bad.kind) == (11, "decode") and "image cut.png cannot be read" in bad.reason
    assert sum(batch.num_tokens for batch in alone) == sum(dataset.lengths) - dataset.lengths[place]
    assert sum(batch.num_tokens for batch in agreed) < sum(batch.num_tokens for batch in alone)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("strict", [True, False])
def test_case_18_long_rows_are_deleted_and_counted(
    tmp_path: Path, strict: bool, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("u"), chat("u " * 400), chat("v"), chat("w")])
    with caplog.at_level(logging.WARNING, logger="swiftcp.data.dataset"):
        dataset = load_dataset([path], encoder(max_length=100, truncation_strategy="delete"), strict=strict, num_workers=num_workers)
    assert dataset.kept == (0, 2, 3) and [row.line for row in dataset.dropped] == [2]
    longest = encoder().length(read_rows([path])[1])
    assert f"1 of 4 rows are longer than max_length 100 and deleted; the longest has {longest} tokens" in caplog.text
    for packing_length in (256, None):
        rows = [row for batch in batches(dataset, layout(packing_length=packing_length), num_train_epochs=1) for row in batch.rows]
        assert sorted(rows) == [0, 2, 3]


def test_case_18_raise_treats_long_rows_as_bad(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("u"), chat("u " * 400), chat("v")])
    with pytest.raises(DataError, match=r"1 of 3 rows are bad[\s\S]*rows.jsonl:2: the row has \d+ tokens, max_length is 100"):
        load_dataset([path], encoder(max_length=100))
    assert load_dataset([path], encoder(max_length=100), strict=False).kept == (0, 2)


def test_too_many_bad_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("u"), {"a": 1}, {"a": 2}])
    with pytest.raises(DataError, match=r"2 of 3 rows are bad \(more than 50%, even without strict\)"):
        load_dataset([path], encoder(), strict=False)


def test_reports_are_cut(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"a": number} for number in range(25)])
    with pytest.raises(DataError, match=r"rows.jsonl:20: [^\n]*\n  \.\.\. and 5 more$"):
        load_dataset([path], encoder())


def test_no_row_is_left(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("u " * 400)])
    with pytest.raises(DataError, match=r"none of 1 rows is left: the longest has \d+ tokens, max_length is 9"):
        load_dataset([path], encoder(max_length=9, truncation_strategy="delete"))


def test_a_scan_can_be_handed_on(mixed: Path) -> None:
    done: list[tuple[int, int]] = []
    scan = scan_rows(read_rows([mixed]), encoder(max_length=100), progress=lambda *figures: done.append(figures))
    again: RowScan = pickle.loads(pickle.dumps(scan))
    assert again == scan and done[-1] == (10, 10)
    assert scan.bad_rows[0] == BadRow(str(mixed), 5, scan.bad_rows[0].reason, "row")
    handed = load_dataset([mixed], encoder(max_length=100), strict=False, scan=again)
    assert (handed.kept, handed.lengths) == (scan.kept, scan.lengths)
    with pytest.raises(DataError, match="4 of 10 rows are bad"):
        load_dataset([mixed], encoder(max_length=100), scan=again)


def test_the_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    def digest(name: str, rows: list[Any]) -> str:
        return load_dataset([write_jsonl(tmp_path / name, rows)], encoder(), strict=False).digest

    (tmp_path / "inner").mkdir()
    tool = {"type": "function", "function": {"name": "at"}}
    original = digest("a.jsonl", [chat("1", "2"), chat("3", "4")])
    assert digest("inner/b.jsonl", [chat("1", "2"), {"bad": 1}, chat("3", "4")]) == original
    others = [[chat("1", "2"), chat("3", "5")], [chat("3", "4"), chat("1", "2")], [chat("1", "2"), chat("3", "4", tools=[tool])]]
    weighted = chat("3", "4")
    weighted["messages"][1]["weight"] = 0.5
    assert len({original, *(digest("c.jsonl", rows) for rows in [*others, [chat("1", "2"), weighted]])}) == 5


def test_split(dataset: EncodedDataset) -> None:
    train, validation = dataset.split(0.3, seed=1)
    assert len(validation) == 3 and sorted(train.kept + validation.kept) == list(range(NUM_ROWS))
    assert validation.lengths == tuple(dataset.lengths[index] for index in validation.kept)
    assert [validation[place].row for place in range(3)] == list(validation.kept)
    assert dataset.split(0.3, seed=1)[1].kept == validation.kept != dataset.split(0.3, seed=2)[1].kept
    assert len(dataset.split(0.001, seed=1)[1]) == 1
    with pytest.raises(DataError, match="cannot be split"):
        dataset.split(0.001, seed=1)[1].split(0.5, seed=1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_workers_arrive_as_they_are(tmp_path: Path, num_workers: int) -> None:
    picture(96, 64).save(tmp_path / "a.png")
    dataset = load_dataset([write_jsonl(tmp_path / "rows.jsonl", [chat("<image>", images=["a.png"])])], encoder())
    (tmp_path / "a.png").unlink()
    with pytest.raises(RowError, match=r"rows.jsonl:1: a.png is no file .*data file$"):
        batches(dataset, layout(), num_workers=num_workers)


def test_data_that_change_during_a_run(tmp_path: Path) -> None:
    picture(96, 64).save(tmp_path / "a.png")
    dataset = load_dataset([write_jsonl(tmp_path / "rows.jsonl", [chat("<image>", images=["a.png"])])], encoder())
    picture(300, 300).save(tmp_path / "a.png")
    with pytest.raises(RowError, match=r"rows.jsonl:1: the row has \d+ tokens, but had \d+ at the start"):
        dataset[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_come_in_order(num_workers: int) -> None:
    assert list(map_in_order(str, iter(range(9)), num_workers=num_workers)) == list("012345678")


def test_workers_outlive_the_first_sigterm_of_a_whole_job() -> None:
    code = """
import psutil, sys
from swiftcp.data.workers import map_in_order
if __name__ == "__main__":
    results = map_in_order(str, range(50), num_workers=1)
    first = next(results)
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        process.terminate()
    print(len(processes), first, len(list(results)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["3", "0", "49"]), done.stderr


@pytest.mark.parametrize(("fields", "trained"), [({"loss": False}, False), ({"weight": 0}, False), ({"weight": 0.5}, True), ({}, True)])
def test_rows_of_which_nothing_is_trained_are_refused(tmp_path: Path, fields: dict[str, Any], trained: bool) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **fields}]
    dataset = load_dataset([write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])], encoder())
    if trained:
        dataset.require_trained("dataset")
    else:
        with pytest.raises(DataError, match="dataset: none of 1 rows has a trained token"):
            dataset.require_trained("dataset")


def test_mean_labels_count_micro_batches_that_hold_rows():
    labels = (1, 2, 3, 10, 20)
    assert mean_labels([(0, 1), (2,), (3, 4), ()], labels, 1) == 36 / 3
    assert mean_labels([(0, 1), (2,), (3, 4), ()], labels, 2) == 36 / 2
    assert mean_labels([(), ()], labels, 2) == 0


def test_every_batch_of_a_step_has_the_mean_of_all_labels_of_the_step(dataset: EncodedDataset):
    whole = batches(dataset, layout(), num_train_epochs=1)
    for step in itertools.batched(whole, 4):
        filled = [batch for batch in step if batch.rows]
        assert {batch.mean_labels for batch in step} == {sum(batch.num_labels for batch in filled) / len(filled)}
    of_two_ranks = [batches(dataset, layout(rank, 2), num_train_epochs=1) for rank in (0, 1)]
    together = [batch.mean_labels for pair in zip(*of_two_ranks, strict=True) for batch in pair]
    assert together == [batch.mean_labels for batch in whole]
