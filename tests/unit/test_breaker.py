"""Sixty rows broken in sixty ways through one scan: each is found, with file, line, what is wrong and what to do; nothing else breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from swiftcp.data.dataset import scan_rows
from swiftcp.data.media import MediaAccess
from swiftcp.data.row_files import read_rows

from .data_fixtures import chat, encoder, picture, write_video

ANSWER = {"role": "assistant", "content": "a"}


def asked(*parts: Any, **columns: Any) -> dict[str, Any]:
    return chat(list(parts), **columns)


def said(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def user(content: Any = "u", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


BROKEN: list[tuple[Any, str]] = [
    ("{", "the line is no JSON"),
    ("[1, 2]", "a row must be a JSON object"),
    ("null", "a row must be a JSON object"),
    ('"text"', "a row must be a JSON object"),
    ('{"messages": [}', "the line is no JSON"),
    ('{"messages": "\\ud83d"}', "lone surrogate"),
    ({}, "expected messages"),
    ({"prompt": "p"}, "expected messages"),
    ({"messages": []}, "conversation is empty"),
    ({"messages": None}, "expected messages"),
    ({"messages": "hello"}, "no JSON"),
    ({"messages": {"role": "user"}}, "must be a list"),
    (said("hi"), "message 1 is str"),
    (said({"role": "usr", "content": "u"}, ANSWER), "the role str 'usr'"),
    (said({"content": "u"}, ANSWER), "the role NoneType"),
    (said(user(), {"role": "system", "content": "s"}, ANSWER), "only the first message may"),
    (said({"role": "tool", "content": "t"}, ANSWER), "a tool answers"),
    (said(user()), "ends with the role user"),
    (said(user(7), ANSWER), "quote numbers"),
    (said(user(None), ANSWER), "must be a string or a list"),
    (said(user(loss=True), ANSWER), "only assistant messages are trained"),
    (said(user(), {**ANSWER, "loss": "no"}), "must be true or false"),
    (said(user(), {**ANSWER, "weight": -1}), "a number from 0"),
    (said(user(), {**ANSWER, "weight": "1"}), "a number from 0"),
    (said(user(), {**ANSWER, "tool_calls": [{}]}), "needs a name"),
    (said(user(), {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}), "no JSON"),
    (said(user(), {**ANSWER, "reasoning_content": 3}), "must be a string"),
    (said(user(), ANSWER, tools="{}"), "must be a list"),
    (said(user(), ANSWER, system=["s"]), "must be a string"),
    ({**chat("u"), "query": "q", "response": "r"}, "keep the columns of one format"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "one of preferences"),
    ({"text": "alone"}, "train on texts with `swiftcp pt`"),
    (chat("<|im_end|>"), "special token"),
    (chat("<|image_pad|>"), "special token"),
    (chat("<image>"), "1 <image> in the messages, but 0"),
    (chat("u", images=["good.png"]), "0 <image> in the messages, but 1"),
    (chat("<video>", images=["good.png"]), "<image>"),
    (chat("<image>", images=[3]), "must be a path"),
    (chat("<image>", images=[""]), "must be a path"),
    (chat("<image>", images="[1"), "no JSON"),
    (asked({"type": "sound"}), "use one of text"),
    (asked({"type": "text"}), "text must be a string"),
    (asked({"type": "image", "image": "good.png", "size": 3}), "unknown keys size"),
    (asked({"type": "video", "video": ["good.png"]}), "fps"),
    (asked({"type": "video", "video": "v.mp4", "fps": 0}), "a number above 0"),
    (chat("<image>", images=["none.png"]), "is no file"),
    (chat("<image>", images=["../outside.png"]), "outside of media_root"),
    (chat("<image>", images=["http://127.0.0.1:9/a.png"]), "set allow_http true"),
    (chat("<image>", images=["ftp://host/a.png"]), "unknown scheme"),
    (chat("<image>", images=["data:image/png;base64,???"]), "is no base64"),
    (chat("<image>", images=["a\0b.png"]), "is no file"),
    (chat("<image>", images=["cut.png"]), "cannot be read"),
    (chat("<image>", images=["empty.png"]), "cannot be read"),
    (chat("<image>", images=["text.png"]), "cannot be read"),
    (chat("<image>", images=["huge.png"]), "max_image_pixels"),
    (chat("<image>", images=["thin.png"]), "crop or pad it"),
    (chat("<video>", videos=["empty.png"]), "cannot be read"),
    (chat("<video>", videos=["good.png.mp4"]), "is no file"),
    (chat("<audio>", audios=["v.mp4"]), "cannot hear"),
    (chat("<image><bbox>", images=["good.png"], objects={"bbox": [[0, 0, 900, 9]]}), "lies outside of image 0"),
    (chat("u " * 900), "max_length is 400"),
]


def write_media(folder: Path) -> None:
    picture(96, 64).save(folder / "good.png")
    picture(9, 9).save(folder.parent / "outside.png")
    Image.new("1", (20_000, 20_000)).save(folder / "huge.png")
    Image.new("RGB", (20, 4100)).save(folder / "thin.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:2000])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("hello")
    write_video(folder / "v.mp4", num_frames=6)


def test_sixty_broken_rows_are_each_told(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    write_media(folder)
    good = json.dumps(chat("<image><video>", images=["good.png"], videos=["v.mp4"]))
    lines = [raw if isinstance(raw, str) else json.dumps(raw) for raw, _ in BROKEN]
    path = folder / "rows.jsonl"
    path.write_text("\n".join([good, *lines, good]) + "\n", encoding="utf-8")
    scan = scan_rows(read_rows([path]), encoder(max_length=400, access=MediaAccess(media_root=folder)))
    found = {row.line: row for row in scan.bad_rows}
    assert scan.kept == (0, len(BROKEN) + 1) and len(BROKEN) >= 60
    reasons = [found[line].reason if line in found else "not found" for line in range(2, len(BROKEN) + 2)]
    missing = [(raw, reason) for (raw, words), reason in zip(BROKEN, reasons, strict=True) if words not in reason]
    assert missing == []
    assert all(row.file == str(path) and len(row.reason) < 600 for row in found.values())
    assert [reason for reason in reasons if ":" not in reason and "use " not in reason] == [], "a remedy stands behind a colon"
