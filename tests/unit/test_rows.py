"""One raw row becomes one typed row, or an error that names file, line, value, rule and remedy."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from swiftcp.data.rows import ImagePart, Message, Row, RowError, TextPart, VideoPart, parse_row
from swiftcp.errors import DataError

from .data_fixtures import chat

FILE = Path("data.jsonl")


def parse(raw: Any) -> Row:
    return parse_row(raw, FILE, 7)


def refused(raw: Any) -> str:
    with pytest.raises(RowError) as caught:
        parse(raw)
    assert str(caught.value).startswith("data.jsonl:7: ")
    return caught.value.reason


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def turns(row: Row) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in row.messages]


def test_tags_take_the_media_in_order() -> None:
    row = parse(chat("<image>one<image><video>two", images=["a.png", "b.png"], videos=["c.mp4"]))
    assert row.messages[0].parts == (
        ImagePart("a.png"),
        TextPart("one"),
        ImagePart("b.png"),
        VideoPart("c.mp4"),
        TextPart("two"),
    )
    assert (row.file, row.line) == (FILE, 7)
    assert [part.source for part in row.images] == ["a.png", "b.png"]
    assert [part.source for part in row.videos] == ["c.mp4"]


def test_parts_carry_their_media() -> None:
    content = [
        {"type": "image", "image": "a.png", "text": None},
        {"type": "text", "text": "look: <image>"},
        {"type": "image_url", "image_url": {"url": "file:///b.png"}},
        {"type": "video", "video": ["0.png", "1.png"], "fps": 2},
        {"video": "c.mp4"},
    ]
    assert parse(chat(content)).messages[0].parts == (
        ImagePart("a.png"),
        TextPart("look: <image>"),
        ImagePart("file:///b.png"),
        VideoPart(("0.png", "1.png"), 2.0),
        VideoPart("c.mp4"),
    )


def test_parts_without_media_take_the_columns() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video", "fps": 3}]
    row = parse(chat(content, images=["a.png"], videos=["c.mp4"]))
    assert row.messages[0].parts == (ImagePart("a.png"), TextPart("and"), VideoPart("c.mp4", 3.0))


@pytest.mark.parametrize(
    ("column", "source"),
    [
        ({"image": "a.png"}, "a.png"),
        ({"images": '["a.png"]'}, "a.png"),
        ({"images": [{"bytes": b"png", "path": "a.png"}]}, b"png"),
        ({"images": [{"bytes": None, "path": "a.png"}]}, "a.png"),
        ({"image": {"path": "a.png"}}, "a.png"),
    ],
)
def test_ways_to_write_an_image(column: dict[str, Any], source: Any) -> None:
    assert parse(chat("<image>", **column)).images == (ImagePart(source),)


@pytest.mark.parametrize("video", [{"video": ["0.png"], "fps": 1.5}, {"frames": ["0.png"], "fps": 1.5}])
def test_videos_of_listed_frames(video: Any) -> None:
    assert parse(chat("<video>", videos=[video])).videos == (VideoPart(("0.png",), 1.5),)


@pytest.mark.parametrize(
    ("raw", "counts"),
    [
        (chat("<image><image>", images=["a.png"]), "2 <image> in the messages, but 1 in images"),
        (chat("<image>", images=["a.png", "b.png"]), "1 <image> in the messages, but 2 in images"),
        (chat("<video>", images=["a.png"]), "0 <image> in the messages, but 1 in images"),
        (chat("<video>"), "1 <video> in the messages, but 0 in videos"),
        (chat("no tag", images=["a.png"]), "0 <image> in the messages, but 1 in images"),
        (chat([{"type": "image", "image": "a.png"}], images=["b.png"]), "0 <image> in the messages, but 1 in images"),
    ],
)
def test_case_01_tags_and_media_must_match(raw: Any, counts: str) -> None:
    reason = refused(raw)
    assert counts in reason and "one image for each tag" in reason.replace("video", "image")


def test_case_01_tags_over_several_turns_are_totalled() -> None:
    messages = [user("<image>a"), assistant("1"), user("<image>b"), assistant("2"), user("c<image>"), assistant("3")]
    row = parse({"messages": messages, "images": ["a.png", "b.png", "c.png"]})
    assert [part.source for part in row.images] == ["a.png", "b.png", "c.png"]
    assert "3 <image> in the messages, but 2 in images" in refused({"messages": messages, "images": ["a.png", "b.png"]})


def test_case_17_uneven_roles_are_kept() -> None:
    row = parse({"messages": [user("u"), assistant("a"), assistant("b"), user("v"), assistant("")]})
    assert turns(row) == [("user", "u"), ("assistant", "a"), ("assistant", "b"), ("user", "v"), ("assistant", "")]


def test_case_16_system_column_and_message() -> None:
    assert turns(parse(chat("hi", system="Be brief.")))[0] == ("system", "Be brief.")
    assert turns(parse(chat("hi", system="")))[0] == ("user", "hi")
    assert turns(parse({"messages": [{"role": "system", "content": ""}, user("hi"), assistant("a")]}))[0] == ("system", "")
    twice = {"messages": [{"role": "system", "content": "a"}, user("hi")], "system": "b"}
    assert "message 2 has the role system" in refused(twice)


def test_loss_and_weight() -> None:
    row = parse({"messages": [user("u"), assistant("a", loss=False), assistant("b", loss=True, weight=0.5), assistant("c", weight=2)]})
    assert [(message.loss, message.weight) for message in row.messages] == [(None, 1.0), (False, 1.0), (True, 0.5), (None, 2.0)]


def test_case_09_twin_tool_calls_are_equal() -> None:
    def with_call(arguments: Any) -> Row:
        call = {"type": "function", "function": {"name": "at", "arguments": arguments}}
        return parse({"messages": [user("u"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("a")]})

    twins = [with_call({"time": 7}), with_call('{"time": 7}'), with_call('{"time":7}')]
    assert twins[0] == twins[1] == twins[2]
    assert with_call({"time": "noon"}).messages[1].tool_calls[0]["function"]["arguments"] == {"time": "noon"}
    assert with_call(None).messages[1].tool_calls[0]["function"]["arguments"] == {}


def test_tools_as_list_and_as_text() -> None:
    tool = {"type": "function", "function": {"name": "at"}}
    assert parse(chat("u", tools=[tool])) == parse(chat("u", tools='[{"type": "function", "function": {"name": "at"}}]'))
    assert parse(chat("u", tools="")).tools == ()


def test_reasoning_content() -> None:
    assert parse({"messages": [user("u"), assistant("a", reasoning_content="r")]}).messages[1].reasoning_content == "r"


def test_sharegpt() -> None:
    conversations = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "<image>u"},
        {"from": "function_call", "value": '{"name": "at", "arguments": {"time": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "a", "loss": False},
    ]
    row = parse({"id": 3, "conversations": conversations, "image": "a.png"})
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2].tool_calls == ({"type": "function", "function": {"name": "at", "arguments": {"time": 1}}},)
    assert row.messages[4] == Message("assistant", (TextPart("a"),), loss=False)


def test_alpaca() -> None:
    row = parse({"instruction": "Add.", "input": "1 2", "output": "3", "history": [["q", "r"]], "system": "s", "text": "whole"})
    assert turns(row) == [("system", "s"), ("user", "q"), ("assistant", "r"), ("user", "Add.\n1 2"), ("assistant", "3")]
    assert turns(parse({"instruction": "Add.", "input": "", "output": "3"})) == [("user", "Add."), ("assistant", "3")]


def test_query_and_response() -> None:
    assert turns(parse({"query": "q<image>", "response": "r", "images": ["a.png"]})) == [("user", "q"), ("assistant", "r")]


def test_text() -> None:
    assert turns(parse({"text": "once"})) == [("text", "once")]
    assert parse({"text": [{"type": "text", "text": "<video>"}]}).messages[0].parts == (TextPart("<video>"),)


def test_columns_as_json_strings() -> None:
    raw = chat("<image>u", images=["a.png"])
    assert parse({column: json.dumps(value) for column, value in raw.items()}) == parse(raw)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([1], "must be a JSON object, not list [1]"),
        ({}, "(none): expected messages"),
        ({"prompt": "x"}, "the columns prompt: expected messages"),
        ({"messages": []}, "conversation is empty"),
        ({"messages": "[{"}, "messages is a string, but no JSON"),
        ({"messages": 3}, "messages is int 3: it must be a list"),
        ({"messages": ["hi"]}, "message 1 is str 'hi'"),
        ({"messages": [{"role": "usr", "content": "u"}]}, "message 1 has the role str 'usr': use one of system, user"),
        ({"messages": [{"content": "u"}]}, "message 1 has the role NoneType None"),
        ({"messages": [user("u"), {"role": "text", "content": "t"}, assistant("a")]}, "message 2 has the role text: use one of system"),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "message 1 has the role list ['gpt']"),
        ({"messages": [user(7)]}, "message 1 has the content int 7"),
        ({"messages": [user(None)]}, "message 1 has the content NoneType None"),
        ({"messages": [user("u"), assistant(None)]}, "message 2 has the content NoneType None"),
        ({"messages": [user(["u"])]}, "message 1 has the part str 'u'"),
        ({"messages": [user([{"type": "sound", "sound": "a.wav"}])]}, "part of type str 'sound'"),
        ({"messages": [user([{"type": ["text"], "text": "t"}])]}, "part of type list ['text']"),
        ({"messages": [user([{"type": "text", "text": 3}])]}, "text must be a string"),
        ({"messages": [user([{"type": "image", "image": "a.png", "max_pixels": 3}])]}, "unknown keys max_pixels"),
        ({"messages": [user([{"type": "image", "image": 3}])]}, "image int 3: it must be a path"),
        ({"messages": [user([{"type": "video", "video": "c.mp4", "fps": 0}])]}, "fps int 0: it must be a number above 0"),
        ({"messages": [user([{"type": "video", "video": ["0.png"]}])]}, "1 listed frames with fps None"),
        (chat("<video>", videos=[["0.png", "1.png"]]), "2 listed frames with fps None"),
        (chat("<image>", images=[""]), "image str ''"),
        (chat("<image>", images="[1"), "images is str '[1', which is no JSON"),
        (chat("<image>", images=["a.png"], image="a.png"), "the row has images and image"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "first message has the role tool"),
        ({"messages": [user("u"), {"role": "system", "content": "s"}]}, "message 2 has the role system"),
        ({"messages": [user("u", loss="yes")]}, "the loss str 'yes'"),
        ({"messages": [user("u", weight=-1)]}, "the weight int -1"),
        ({"messages": [user("u", weight=True)]}, "the weight bool True"),
        ({"messages": [user("u", weight=1e30)]}, "the weight float 1e+30: it must be a number from 0 to 1,000,000"),
        ({"messages": [user("u", tool_calls=[{"name": "at"}])]}, "only an assistant message may"),
        ({"messages": [assistant("a", tool_calls=3)]}, "the tool_calls int 3"),
        ({"messages": [assistant("a", tool_calls=[{"function": {}}])]}, "it needs a name and arguments"),
        ({"messages": [assistant("a", tool_calls=[{"name": "at", "arguments": "{"}])]}, "arguments of at in message 1"),
        ({"messages": [assistant("a", tool_calls=[{"name": "at", "arguments": [1]}])]}, "calls at with list [1]"),
        ({"messages": [assistant("a", reasoning_content=3)]}, "the reasoning_content int 3"),
        (chat("u", tools={"name": "at"}), "tools is dict"),
        (chat("u", system=3), "system is int 3"),
        ({**chat("u"), "query": "q", "response": "r"}, "reads as messages and as query and response"),
        ({"query": "q", "response": "r", "history": [["q"]]}, "history 1 is ['q']"),
        ({"instruction": 3, "input": "a", "output": "b"}, "they must be strings"),
        ({"text": 3}, "message 1 has the content int 3"),
        ({"text": "t", "system": "s"}, "the row has text and system"),
    ],
)
def test_refused(raw: Any, words: str) -> None:
    assert words in refused(raw)


def test_long_values_are_cut() -> None:
    assert len(refused({"messages": [user([{"type": "x" * 5000}])]})) < 250


def test_error_is_a_data_error_and_survives_pickling() -> None:
    error = RowError(FILE, 3, "reason")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DataError) and str(again) == str(error) == "data.jsonl:3: reason"
    assert (again.file, again.line, again.reason, again.exit_code) == (FILE, 3, "reason", 2)


@pytest.mark.parametrize("place", ["content", "role key", "tools"])
def test_half_of_a_surrogate_pair_is_no_text(place: str) -> None:
    raw: dict[str, Any] = {"messages": [user("hello"), assistant("a")]}
    if place == "content":
        raw["messages"][1]["content"] = "a \ud83d"
    elif place == "tools":
        raw["tools"] = [{"type": "function", "function": {"name": "\ud83d"}}]
    else:
        raw["messages"][0]["\ud83d"] = 1
    assert "lone surrogate U+D83D" in refused(raw)
    assert turns(parse({"messages": [user("\U0001f600"), assistant("a")]}))[0] == ("user", "\U0001f600")
