"""Files and folders of rows keep file and line, read lazily, and never fail on mixed types."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swiftcp.data.row_files import read_rows
from swiftcp.data.rows import ImagePart, RowError
from swiftcp.errors import DataError

from .data_fixtures import chat, write_jsonl


def test_json_lines_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = ["\ufeff" + json.dumps(chat("é 一")), "", "   ", json.dumps(chat("two")) + "\r", json.dumps(chat("three"))]
    path.write_bytes("\n".join(lines).encode())
    rows = read_rows([path])
    assert [(row.line, row.messages[0].text) for row in rows] == [(1, "é 一"), (4, "two"), (5, "three")]
    assert all(row.file == path for row in rows)


def test_broken_json_names_its_line_and_spares_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(chat("one")).encode() + b"\n{\n\xff\n" + json.dumps(chat("four")).encode())
    rows = read_rows([path])
    assert rows[0].messages[0].text == "one" and rows[3].messages[0].text == "four"
    for index in (1, 2):
        with pytest.raises(RowError, match=rf"rows.jsonl:{index + 1}: the line is no JSON .*one object a line"):
            rows[index]


def test_case_09_mixed_types_load(tmp_path: Path) -> None:
    calls = [[{"name": "at", "arguments": arguments}] for arguments in ({"time": 7}, {"time": "noon"}, '{"time": 7}')]
    messages = [[{"role": "assistant", "content": "", "tool_calls": call}] for call in calls]
    raws = [{"messages": conversation, "extra": extra} for conversation, extra in zip(messages, (1, "a", []), strict=True)]
    rows = read_rows([write_jsonl(tmp_path / "rows.jsonl", raws)])
    assert [row.messages[0].tool_calls[0]["function"]["arguments"]["time"] for row in rows] == [7, "noon", 7]


def test_json_list_keeps_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([chat("one"), chat("two, [x]")], indent=1))
    rows = read_rows([path])
    assert [row.messages[0].text for row in rows] == ["one", "two, [x]"]
    assert [row.line for row in rows] == [2, 2 + len(json.dumps(chat("one"), indent=1).splitlines())]


def test_json_file_of_lines(tmp_path: Path) -> None:
    assert len(read_rows([write_jsonl(tmp_path / "rows.json", [chat("one"), chat("two")])])) == 2


def test_json_list_that_breaks_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n{"text": "a"},\n{"text": }\n]')
    with pytest.raises(RowError, match=r"rows.json:3: the list of rows breaks here"):
        read_rows([path])


def test_csv_cells_are_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('query,response,images,system\n"<image>a\nb",7,"[""a.png""]",\nc,d,,s\n', encoding="utf-8")
    first, second = read_rows([path])
    assert [message.text for message in first.messages] == ["a\nb", "7"] and first.images == (ImagePart("a.png"),)
    assert [message.text for message in second.messages] == ["s", "c", "d"]
    assert (first.line, second.line) == (2, 4)


def test_csv_with_too_many_cells_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("query,response\na,b\na,b,c\n")
    with pytest.raises(RowError, match=r"rows.csv:3: the row has more cells than the 2 columns"):
        read_rows([path])


def test_csv_reads_long_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text\n{'x' * 300_000}\n")
    assert len(read_rows([path])[0].messages[0].text) == 300_000


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parts = [
        [{"type": "image", "image": {"bytes": b"png", "path": None}}, {"type": "text", "text": "what?"}],
        [{"type": "text", "text": "who?"}],
    ]
    messages = [[{"role": "user", "content": part}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}] for part in parts]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": messages}), path)
    return path


def test_parquet_drops_what_arrow_filled_in(parquet: Path) -> None:
    rows = read_rows([parquet])
    assert [row.line for row in rows] == [1, 2]
    assert rows[0].images == (ImagePart(b"png"),) and rows[1].images == ()
    assert rows[1].messages[0].text == "who?"


def test_parquet_image_columns_stay_bytes(tmp_path: Path, parquet: Path) -> None:
    import datasets

    features = datasets.Features({"query": datasets.Value("string"), "response": datasets.Value("string"), "image": datasets.Image()})
    columns = {"query": ["<image>?"], "response": ["r"], "image": [{"bytes": b"png", "path": "a.png"}]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "images.parquet")
    assert read_rows([tmp_path / "images.parquet"])[0].images == (ImagePart(b"png"),)


def test_parquet_that_is_none(tmp_path: Path, parquet: Path) -> None:
    path = tmp_path / "text.parquet"
    path.write_text("no parquet")
    with pytest.raises(DataError, match=r"text.parquet cannot be read as Parquet"):
        read_rows([path])


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"query": "q", "response": "r"}] * 2)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "several")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "other")
    assert [row.line for row in read_rows([tmp_path / "one", tmp_path / "several"])] == [1, 2, 1, 2]
    with pytest.raises(DataError, match="has the splits test, of which none is train"):
        read_rows([tmp_path / "other"])


def test_names_on_the_hub_come_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from datasets.arrow_writer import ArrowWriter

    cached = tmp_path / "owner___name" / "default" / "0.0.0" / "0a1b"
    cached.mkdir(parents=True)
    features = datasets.Features({"query": datasets.Value("string"), "response": datasets.Value("string")})
    writer = ArrowWriter(path=str(cached / "name-train.arrow"), features=features)
    for query in "abc":
        writer.write({"query": query, "response": "r"})
    count, size = writer.finalize()
    splits = datasets.SplitDict({"train": datasets.splits.SplitInfo("train", size, count, dataset_name="name")}, dataset_name="name")
    info = datasets.DatasetInfo(features=features, builder_name="parquet", dataset_name="name", config_name="default", splits=splits)
    info.version = datasets.Version("0.0.0")
    info.write_to_directory(str(cached))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert [row.messages[0].text for row in read_rows(["owner/name#2"])] == ["a", "b"]
    assert str(read_rows(["owner/name"])[2].error("no")) == "owner/name:3: no"
    with pytest.raises(DataError, match=r"dataset owner/none is no path here, and datasets cannot load it from the Hub or its local cache"):
        read_rows(["owner/none"])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_that_is_null_at_first(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = [{"query": "q", "response": "r", "system": None} for _ in range(1100)] + [{"query": "q", "response": "r", "system": "s"}]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(path, raws)
    elif kind == "csv":
        path.write_text("query,response,system\n" + "".join(f"q,r,{raw['system'] or ''}\n" for raw in raws))
    else:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        pq.write_table(pa.Table.from_pylist(raws), path, row_group_size=100)
    rows = read_rows([path])
    assert len(rows[0].messages) == 2 and [message.role for message in rows[1100].messages] == ["system", "user", "assistant"]


def test_folders_and_several_data_sets(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", [chat("b")])
    write_jsonl(folder / "a.json", [chat("a1"), chat("a2")])
    (folder / "readme.txt").write_text("not rows")
    rows = read_rows([folder, write_jsonl(tmp_path / "c.jsonl", [chat("c")])])
    assert [row.messages[0].text for row in rows] == ["a1", "a2", "b", "c"]
    assert [row.messages[0].text for row in rows[1:3]] == ["a2", "b"]
    with pytest.raises(IndexError):
        rows[4]


def test_first_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat(str(number)) for number in range(5)])
    assert [row.messages[0].text for row in read_rows([f"{path}#2"])] == ["0", "1"]
    assert [row.messages[0].text for row in read_rows([f"{tmp_path}#3"])] == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"rows.jsonl#9 holds only 5 rows"):
        read_rows([f"{path}#9"])
    with pytest.raises(DataError, match=r"rows.jsonl#two does not exist: did you mean '.*rows.jsonl'\?"):
        read_rows([f"{path}#two"])


def test_a_name_with_a_hash(tmp_path: Path) -> None:
    assert len(read_rows([write_jsonl(tmp_path / "rows#1.jsonl", [chat("a"), chat("b")])])) == 2


def test_missing_paths_suggest_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [chat("a")])
    with pytest.raises(DataError, match=r"trian.jsonl does not exist: did you mean '.*train.jsonl'\?"):
        read_rows([tmp_path / "trian.jsonl"])
    with pytest.raises(DataError, match=r"ends in '.txt': expected one of .jsonl"):
        (tmp_path / "rows.txt").touch()
        read_rows([tmp_path / "rows.txt"])


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"rows.jsonl holds no rows"):
        read_rows([tmp_path / "rows.jsonl"])
    with pytest.raises(DataError, match=r"empty holds no data set"):
        read_rows([tmp_path / "empty"])


def test_rows_are_light_to_send(tmp_path: Path) -> None:
    rows = read_rows([write_jsonl(tmp_path / "rows.jsonl", [chat("x" * 1000) for _ in range(50)])])
    sent = pickle.dumps(rows)
    assert len(sent) < 5000
    assert pickle.loads(sent)[49] == rows[49]
