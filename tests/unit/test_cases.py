"""Cases that users of such tools met in public, as far as no other file has them; docs/cases.md lists all with their tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from swiftcp.data.batch import collate_pack
from swiftcp.data.dataset import load_dataset
from swiftcp.data.encode import RowEncoder
from swiftcp.data.rows import parse_row
from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids
from swiftcp.trainers.logs import Clock
from swiftcp.trainers.step import Totals

from .data_fixtures import chat, encoder, processor, write_jsonl

ROOT = Path(__file__).parents[2]


def encoded(folder: Path, raw: dict[str, Any], made: RowEncoder | None = None) -> Any:
    return (made or encoder()).encode(parse_row(raw, folder / "d.jsonl", 1), 0)


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (31, 33)])
def test_case_03_small_images_are_scaled_up(size: tuple[int, int], tmp_path: Path) -> None:
    Image.new("RGB", size, "red").save(tmp_path / "a.png")
    made = encoder()
    sample = encoded(tmp_path, chat("<image>", images=["a.png"]), made)
    theirs = processor().image_processor(images=[Image.new("RGB", size, "red")], return_tensors="pt")["image_grid_thw"]
    assert torch.equal(sample.visual.grid_thw, theirs)
    assert sample.visual.positions_V.numel() == theirs.prod() // 4
    assert made.length(parse_row(chat("<image>", images=["a.png"]), tmp_path / "d.jsonl", 1)) == len(sample)


def test_case_10_a_video_counts_one_block_of_tokens_for_each_frame_pair() -> None:
    text, start, end, video = 7, 90, 91, 93
    block = [text, start, *[video] * 4, end]
    ids = torch.tensor([text, *block, *block, *block, text])
    found = qwen3_vl_position_ids(ids, None, torch.tensor([[3, 4, 4]]), image_token_id=92, video_token_id=video, spatial_merge_size=2)
    blocks = [[[at, at, at, at], [at, at, at + 1, at + 1], [at, at + 1, at, at + 1]] for at in (3, 8, 13)]
    where = (ids == video).nonzero().flatten().view(3, 4)
    assert [found[:, places].tolist() for places in where] == blocks
    assert found[:, [0, 1, 2, 7, 22]].tolist() == [[0, 1, 2, 5, 16]] * 3


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_case_18_truncation_cuts_text_and_never_media(strategy: Any, tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), "red").save(tmp_path / "a.png")
    rows = {"text": chat("one two " * 30, "three"), "image": chat("<image>" + "one two " * 30, "three", images=["a.png"])}
    made = encoder(truncation_strategy=strategy, max_length=40)
    for name, raw in rows.items():
        sample, whole = encoded(tmp_path, raw, made), encoded(tmp_path, raw)
        assert made.measure(parse_row(raw, tmp_path / "d.jsonl", 1)) == (len(sample), int((sample.weights_L[1:] > 0).sum()))
        if (name, strategy) == ("image", "left"):
            assert len(sample) == len(whole) > 40, "too long still: the row goes"
            continue
        kept = slice(-40, None) if strategy == "left" else slice(40)
        assert torch.equal(sample.input_ids_L, whole.input_ids_L[kept]) and torch.equal(sample.labels_L, whole.labels_L[kept])
        assert sample.position_ids_3L.shape == (3, 40) and sample.position_ids_3L[:, 0].tolist() == [0, 0, 0]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows.values(), chat("short")])
    dataset = load_dataset([path], made)
    assert max(dataset.lengths) == 40 and [row.line for row in dataset.dropped] == ([2] if strategy == "left" else [])


def test_case_19_positions_of_a_pack_restart_in_each_sample(tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), "red").save(tmp_path / "a.png")
    rows = [chat("one"), chat("<image>two", images=["a.png"]), chat("three")]
    samples = [encoded(tmp_path, raw) for raw in rows]
    pack = collate_pack(samples, pack_align=8, pad_token_id=0)
    assert pack.cu_seqlens is not None
    for sample, start in zip(samples, pack.cu_seqlens.tolist(), strict=False):
        assert torch.equal(pack.position_ids_3BS[:, 0, start : start + len(sample)], sample.position_ids_3L)
        assert sample.position_ids_3L[:, 0].tolist() == [0, 0, 0]


def test_case_44_the_loss_is_a_mean_of_tokens_and_the_time_left_that_of_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batches = [(2.0 * labels, labels) for labels in (3, 5, 1, 40, 2)]
    totals = Totals(sum(loss for loss, _ in micro_batches), sum(labels for _, labels in micro_batches), 60, 64)
    assert totals.loss == 2.0, "a constant loss stays what it is, however micro-batches fall on steps"
    now = iter([100.0, 105.0, 105.0])
    monkeypatch.setattr("swiftcp.trainers.logs.perf_counter", lambda: next(now))
    clock = Clock(first_step=40, num_steps=50, seconds_before=1000.0)
    assert (clock.elapsed(), clock.remaining(45)) == (1005.0, 5.0)


def test_every_case_is_listed_with_tests_that_exist() -> None:
    listed = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "docs" / "cases.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, 46))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for number, tests in listed:
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, number
        assert [name for name in names if f"def {name}(" not in sources] == [], number
