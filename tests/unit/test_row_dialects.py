"""Dialects of rows beyond those of `test_rows.py`: prompts with completions, roles of tools, OpenAI's parts, grounding, preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftcp.data.rows import AudioPart, ImagePart, Row, RowError, TextPart, parse_row

from .data_fixtures import chat, encoder, picture, write_jsonl


def parse(raw: Any) -> Row:
    return parse_row(raw, Path("data.jsonl"), 7)


def turns(raw: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in parse(raw).messages]


def refused(raw: Any) -> str:
    with pytest.raises(RowError) as caught:
        parse(raw)
    return caught.value.reason


def test_prompt_and_completion() -> None:
    assert turns({"prompt": "q<image>", "completion": "a", "images": ["a.png"]}) == [("user", "q"), ("assistant", "a")]
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    row = parse({"prompt": told, "completion": [{"role": "assistant", "content": "b"}]})
    assert [message.role for message in row.messages] == ["user", "assistant", "user", "assistant"]
    assert [message.loss for message in row.messages] == [None, False, None, None]


@pytest.mark.parametrize(
    ("raw", "columns"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rejected"),
        ({**chat("q"), "rejected_response": "b"}, "rejected_response"),
        ({"query": "q", "response": "a", "rejected_messages": [{"role": "assistant", "content": "b"}]}, "rejected_messages"),
        ({"prompt": "q", "completion": "a", "label": True}, "label"),
    ],
)
def test_preferences_are_refused_by_name(raw: Any, columns: str) -> None:
    assert f"the row is one of preferences (it has {columns})" in refused(raw)


def test_roles_of_tools_become_one_turn_with_calls() -> None:
    calls = [{"role": "tool_call", "content": json.dumps({"name": name, "arguments": {"x": 1}})} for name in ("at", "on")]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}, *calls, {"role": "tool_response", "content": "3"}]
    row = parse({"messages": [*messages, {"role": "assistant", "content": "a"}]})
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [call["function"]["name"] for call in row.messages[2].tool_calls] == ["at", "on"]
    thought = {"role": "assistant", "content": "I look."}
    row = parse({"messages": [messages[1], thought, calls[0], *messages[4:], {"role": "assistant", "content": "a"}]})
    assert row.messages[1].text == "I look." and len(row.messages[1].tool_calls) == 1


def test_parts_as_openai_writes_them() -> None:
    content = [
        {"type": "input_text", "text": "t"},
        {"type": "input_image", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    ]
    parts = parse(chat(content)).messages[0].parts
    assert parts == (TextPart("t"), ImagePart("a.png"), ImagePart("b.png"), AudioPart("data:audio/wav;base64,QUJD"))


def grounded(folder: Path, objects: Any, user: str = "<image>Where is the <ref-object>?", answer: str = "<bbox>") -> str:
    """The text that a row of one image of 200x100 becomes."""
    picture(200, 100).save(folder / "a.png")
    raw = chat(user, answer, images=["a.png"], objects=objects)
    row = parse_row(raw, write_jsonl(folder / "d.jsonl", [raw]), 1)
    made = encoder()
    return made._processor.tokenizer.decode(made.encode(row, 0).input_ids_L)


@pytest.mark.parametrize(
    ("bbox", "bbox_type", "written"),
    [
        ([20, 10, 100, 100], None, "[100, 100, 500, 1000]"),
        ([20, 10, 100, 100], "real", "[100, 100, 500, 1000]"),
        ([0.1, 0.1, 0.5, 1.0], "norm1", "[100, 100, 500, 1000]"),
        ([100, 100, 500, 1000], "norm1000", "[100, 100, 500, 1000]"),
        ([100, 50], "real", "[500, 500]"),
        ([0, 0, 200.6, 100.2], "real", "[0, 0, 1000, 1000]"),
    ],
)
def test_grounding_in_the_models_own_coordinates(tmp_path: Path, bbox: list[float], bbox_type: str | None, written: str) -> None:
    objects = {"ref": ["cat"], "bbox": [bbox], **({"bbox_type": bbox_type} if bbox_type else {})}
    text = grounded(tmp_path, objects)
    assert f"Where is the cat?<|im_end|>\n<|im_start|>assistant\n{written}<|im_end|>" in text


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"ref": ["cat"], "bbox": []}, "1 <bbox> in the messages, but 0 bbox in objects"),
        ({"ref": [], "bbox": [[0, 0, 1, 1]]}, "1 <ref-object> in the messages, but 0 ref"),
        ({"ref": [3], "bbox": [[0, 0, 1, 1]]}, "the ref int 3: it must be a string"),
        ({"ref": ["cat"], "bbox": [[0, 0, 1]]}, "bbox 1 of objects is list [0, 0, 1]"),
        ({"ref": ["cat"], "bbox": [[9, 0, 1, 1]]}, "is it x, y, width, height?"),
        ({"ref": ["cat"], "bbox": [[0, 0, 1, 1]], "image_id": [1]}, "in image int 1, but the row has 1 images"),
        ({"ref": ["cat"], "bbox": [[0, 0, 1, 1]], "bbox_type": "pixels"}, "the bbox_type str 'pixels'"),
        ([1], "objects is list [1]"),
        ({"ref": ["cat"], "bbox": [[0, 0, 300, 100]]}, "lies outside of image 0 of 200x100 (real)"),
        ({"ref": ["cat"], "bbox": [[0, 0, 300, 100]], "bbox_type": "norm1"}, "(norm1)"),
    ],
)
def test_grounding_that_is_refused(tmp_path: Path, objects: Any, words: str) -> None:
    with pytest.raises(RowError) as caught:
        grounded(tmp_path, objects)
    assert words in caught.value.reason


def test_without_objects_the_tags_are_text() -> None:
    assert turns(chat("say <bbox>"))[0] == ("user", "say <bbox>")
