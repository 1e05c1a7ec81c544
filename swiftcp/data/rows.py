"""Typed rows, and how a raw JSON object becomes one.

A row is a conversation of messages, each a list of text, image, video and audio parts; a text for pre-training is one message of
the role `text`. Everything that can be wrong with a row by itself, without a model, is refused here: `parse_row` raises `RowError`
with file, line, value, rule and remedy. `<image>`, `<video>` and `<audio>` are tags in plain strings only: in a list of parts,
text is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from swiftcp.data.grounding import Objects, parse_objects
from swiftcp.data.row_formats import to_messages
from swiftcp.data.tool_calls import parse_tool_calls, parse_tools
from swiftcp.data.values import check_text, parse_json, shown
from swiftcp.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
TEXT_ROLE = "text"
"""The role of the one message of a `{"text": ...}` row."""

KINDS = ("image", "video", "audio")
"""Of media."""

_TAG = re.compile("(<image>|<video>|<audio>)")
_PART_KEYS = {kind: (kind, "url", "path", f"{kind}_url", f"input_{kind}") for kind in KINDS}
_PART_TYPES = dict.fromkeys(("text", "input_text", "output_text"), "text") | {
    name: kind for kind in KINDS for name in (kind, f"{kind}_url", f"input_{kind}")
}

MediaSource = str | bytes
"""A path (relative to the data file), a `file://`, `http(s)://` or `data:` URI, or a file's bytes."""


MAX_WEIGHT = 1_000_000
"""Of a message: beyond, it is a slip, and float32 sums would lose every other token."""


class RowError(DataError):
    """A row that cannot be used. `kind` is the sort of reason, for counts: "row", "media" or "length"."""

    def __init__(self, file: Path, line: int, reason: str, kind: str = "row") -> None:
        super().__init__(file, line, reason, kind)
        self.file = file
        self.line = line
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """One line of bad_rows.jsonl."""

    file: str
    line: int
    reason: str
    kind: str
    """"row", "media" or "length", or "decode" of media that could not be decoded when their row was to be trained."""


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    kind: ClassVar[str] = "image"
    source: MediaSource


@dataclass(frozen=True, slots=True)
class VideoPart:
    kind: ClassVar[str] = "video"
    source: MediaSource | tuple[MediaSource, ...]
    """A video file, or its frames in order."""
    fps: float | None = None
    """Frames a second: of the frames where they are listed, else to sample from the file."""


@dataclass(frozen=True, slots=True)
class AudioPart:
    kind: ClassVar[str] = "audio"
    source: MediaSource


MediaPart = ImagePart | VideoPart | AudioPart
Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    parts: tuple[Part, ...]
    loss: bool | None = None
    """Whether it is trained; None leaves it to the mode."""
    weight: float = 1.0
    """Factor of the loss of its tokens."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name": str, "arguments": dict}}` each."""
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Its text parts, joined with nothing between."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Row:
    file: Path
    line: int
    """1-based line, or position where the format has no lines."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    use_audio_in_video: bool = False
    """Whether the sound of its videos is heard, interleaved with their frames."""
    objects: Objects | None = None
    """What the texts' `<ref-object>` and `<bbox>` stand for."""

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """In the order of the conversation."""
        return tuple(part for message in self.messages for part in message.parts if not isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """In the order of the conversation."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, ImagePart))

    @property
    def videos(self) -> tuple[VideoPart, ...]:
        """In the order of the conversation."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, VideoPart))

    @property
    def audios(self) -> tuple[AudioPart, ...]:
        """In the order of the conversation; the sound of videos is not among them."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, AudioPart))

    @property
    def sounds(self) -> tuple[AudioPart | VideoPart, ...]:
        """Everything that is heard, in the order of the conversation."""
        heard = (AudioPart, VideoPart) if self.use_audio_in_video else AudioPart
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, heard))

    def with_texts(self, write: Callable[[str], str]) -> Row:
        """The row with each of its texts, in order, as `write` gives it back."""
        messages = [
            replace(message, parts=tuple(TextPart(write(part.text)) if isinstance(part, TextPart) else part for part in message.parts))
            for message in self.messages
        ]
        return replace(self, messages=tuple(messages))

    def error(self, reason: str, kind: str = "row") -> RowError:
        return RowError(self.file, self.line, reason, kind)


@dataclass(frozen=True, slots=True)
class _Tag:
    """A place for the next medium of the row's `images`, `videos` or `audios`."""

    kind: str
    fps: float | None = None


_RawParts = list[Part | _Tag]


def parse_row(raw: Any, file: Path, line: int) -> Row:
    """One row of any known format.

    Raises:
        RowError: the row is in no known format, or breaks a rule of it.
    """
    try:
        if not isinstance(raw, dict):
            raise DataError(f'a row must be a JSON object, not {shown(raw)}: write {{"messages": [...]}}')
        check_text(raw)
        messages = [_parse_message(item, position) for position, item in enumerate(to_messages(raw), start=1)]
        _check_roles([message.role for message, _ in messages])
        media = {kind: _media_column(raw, kind) for kind in KINDS}
        _check_counts(messages, media)
        sources = {kind: iter(sources) for kind, sources in media.items()}
        filled = tuple(replace(message, parts=tuple(_fill(parts, sources))) for message, parts in messages)
        row = Row(file, line, filled, tuple(parse_tools(raw.get("tools"))), _parse_flag(raw, "use_audio_in_video"))
        texts = [part.text for message in filled for part in message.parts if isinstance(part, TextPart)]
        return replace(row, objects=parse_objects(raw.get("objects"), texts, num_images=len(row.images)))
    except DataError as error:
        raise RowError(file, line, str(error)) from None


def _parse_message(item: Any, position: int) -> tuple[Message, _RawParts]:
    if not isinstance(item, Mapping):
        raise DataError(f"message {position} is {shown(item)}: it must be an object with role and content")
    role = item.get("role")
    if role not in (*ROLES, TEXT_ROLE):
        raise DataError(f"message {position} has the role {shown(role)}: use one of {', '.join(ROLES)}")
    tool_calls = tuple(parse_tool_calls(item.get("tool_calls"), position))
    reasoning = item.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise DataError(f"message {position} has the reasoning_content {shown(reasoning)}: it must be a string")
    if role != "assistant" and (tool_calls or reasoning):
        raise DataError(f"message {position} of role {role} has tool_calls or reasoning_content: only an assistant message may")
    message = Message(role, (), _parse_loss(item, position), _parse_weight(item, position), tool_calls, reasoning)
    return message, _parse_content(item.get("content"), position, may_be_none=bool(tool_calls))


def _parse_flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value not in (None, True, False):
        raise DataError(f"{key} is {shown(value)}: it must be true or false")
    return bool(value)


def _parse_loss(item: Mapping[str, Any], position: int) -> bool | None:
    loss = item.get("loss")
    if loss not in (None, True, False):
        raise DataError(f"message {position} has the loss {shown(loss)}: it must be true or false; weight scales the loss")
    return None if loss is None else bool(loss)


def _parse_weight(item: Mapping[str, Any], position: int) -> float:
    weight = item.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise DataError(f"message {position} has the weight {shown(weight)}: it must be a number from 0 to {MAX_WEIGHT:,}")
    return float(weight)


def _parse_content(content: Any, position: int, *, may_be_none: bool) -> _RawParts:
    if isinstance(content, str):
        pieces = _TAG.split(content)
        return [_Tag(piece[1:-1]) if index % 2 else TextPart(piece) for index, piece in enumerate(pieces) if index % 2 or piece]
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return [_parse_part(part, position) for part in content]
    if content is None and may_be_none:
        return []
    raise DataError(f"message {position} has the content {shown(content)}: it must be a string or a list of parts; quote numbers")


def _parse_part(part: Any, position: int) -> Part | _Tag:
    if not isinstance(part, Mapping):
        raise DataError(f'message {position} has the part {shown(part)}: write {{"type": "text", "text": ...}}')
    fields = {key: value for key, value in part.items() if value is not None}
    kind = fields.pop("type", None) or next((key for key in ("text", *KINDS) if key in fields), None)
    if not isinstance(kind, str) or kind not in _PART_TYPES:
        raise DataError(f"message {position} has a part of type {shown(kind)}: use one of text, {', '.join(KINDS)}")
    kind = _PART_TYPES[kind]
    if kind == "text":
        parsed: Part | _Tag = TextPart(_text_of(fields.pop("text", None), position))
    else:
        fps = _parse_fps(fields.pop("fps", None)) if kind == "video" else None
        key = next((key for key in _PART_KEYS[kind] if key in fields), None)
        parsed = _Tag(kind, fps) if key is None else _media_part(kind, fields.pop(key), fps)
    if fields:
        raise DataError(f"message {position} has a part of type {kind} with the unknown keys {', '.join(fields)}: remove them")
    return parsed


def _text_of(value: Any, position: int) -> str:
    if not isinstance(value, str):
        raise DataError(f"message {position} has a text part with {shown(value)}: text must be a string")
    return value


def _parse_fps(fps: Any) -> float | None:
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf")):
        raise DataError(f"a video has the fps {shown(fps)}: it must be a number above 0")
    return None if fps is None else float(fps)


def _media_part(kind: str, value: Any, fps: float | None = None) -> MediaPart:
    """A medium from whatever stands for it: a source, its dict, or for a video its frames."""
    if kind != "video":
        return ImagePart(_source(kind, value)) if kind == "image" else AudioPart(_source(kind, value))
    if isinstance(value, Mapping) and ("video" in value or "frames" in value):
        fps = _parse_fps(value.get("fps")) or fps
        value = value.get("video") or value.get("frames")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not value or fps is None:
            raise DataError(f'a video of {len(value)} listed frames with fps {fps}: write {{"video": [frames], "fps": 2.0}}')
        return VideoPart(tuple(_source("frame", frame) for frame in value), fps)
    return VideoPart(_source(kind, value), fps)


def _source(kind: str, value: Any) -> MediaSource:
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):  # OpenAI's input_audio
        value = f"data:{kind}/{value.get('format', '*')};base64,{value['data']}"
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), value)
    if not isinstance(value, str | bytes) or not value:
        raise DataError(f"{kind} {shown(value)}: it must be a path, a URI, or an object with bytes or path")
    return value


def _media_column(raw: Mapping[str, Any], kind: str) -> list[MediaPart]:
    """The row's `images` (or `image`), and so on."""
    given = [key for key in (f"{kind}s", kind) if raw.get(key) is not None]
    if len(given) > 1:
        raise DataError(f"the row has {given[0]} and {given[1]}: keep {given[0]}")
    value = raw[given[0]] if given else []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, given[0])
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        value = [value]
    return [_media_part(kind, item) for item in value]


def _check_counts(messages: Sequence[tuple[Message, _RawParts]], media: Mapping[str, Sequence[Any]]) -> None:
    for kind, given in media.items():
        num_tags = sum(isinstance(part, _Tag) and part.kind == kind for _, parts in messages for part in parts)
        if num_tags != len(given):
            raise DataError(
                f"{num_tags} <{kind}> in the messages, but {len(given)} in {kind}s: give one {kind} for each tag"
                ' (to keep a tag as text, write the content as [{"type": "text", "text": ...}])'
            )


def _fill(parts: _RawParts, media: Mapping[str, Iterator[MediaPart]]) -> Iterator[Part]:
    """Put the row's media in the places of its tags."""
    for part in parts:
        if not isinstance(part, _Tag):
            yield part
            continue
        medium = next(media[part.kind])
        yield replace(medium, fps=part.fps) if isinstance(medium, VideoPart) and part.fps is not None else medium


def _check_roles(roles: Sequence[str]) -> None:
    if not roles:
        raise DataError("the conversation is empty: give at least one message")
    if TEXT_ROLE in roles and len(roles) > 1:
        raise DataError(f"message {roles.index(TEXT_ROLE) + 1} has the role {TEXT_ROLE}: use one of {', '.join(ROLES)}")
    for position, role in enumerate(roles[1:], start=2):
        if role == "system":
            raise DataError(f"message {position} has the role system: only the first message may (is there a system column too?)")
    if roles[0] == "tool":
        raise DataError("the first message has the role tool: a tool answers an assistant message")
