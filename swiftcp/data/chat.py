"""Rows as text: rendered with the checkpoint's own chat template, and which characters of it are trained.

In `sft`, each assistant turn's content (with its reasoning and tool calls) and its end token are trained: not the newline behind
it, and not what the template supplies itself, such as the header or an empty block of thoughts. The whole conversation is rendered
at once, for templates treat the last turn differently. Templates of Qwen do not say where contents lie, so they are found thus:

1. Every assistant content is rendered a second time between two marks. Where taking the marks out gives the plain rendering back,
   exactly, the contents lie between them.
2. A template that rewrites contents (strips white space, drops the thoughts of earlier turns) fails that. Then turns are found by
   the template's structure: each begins behind the header that a generation prompt ends with, and ends at the end token. Both are
   made of special tokens, which no text of a row may hold, so this cannot hit a user's text. From the turn's beginning the
   generation prompt's own text is left out, and what the template writes there before any content.

`loss_scale` trains more or less than that: `last_round` the turns behind the last user message, `all` the whole text. A message's own
`loss` wins over it. With `ignore_empty_think` blocks of thoughts that hold nothing are not trained, whoever wrote them.

In `pt`, no template is used: texts are joined with nothing between, and one end-of-text token follows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import numpy as np

from swiftcp.config.concerns import LossScale
from swiftcp.data.rows import KINDS, TEXT_ROLE, MediaPart, Message, Part, Row, TextPart
from swiftcp.data.values import shown
from swiftcp.errors import DataError

_EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*")
_MARK = re.compile("\ue000([0-9]+)\ue001")
"""Marks are numbers between two private characters."""


@dataclass(frozen=True)
class Span:
    """Trained characters, from `start` up to `end`."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Rendered:
    text: str
    """With one placeholder for each medium."""
    spans: tuple[Span, ...]
    """In order, apart from each other."""


@dataclass(frozen=True)
class _Layout:
    """How the template writes an assistant turn."""

    header: str
    supplied: str
    """What a generation prompt writes behind the header."""
    end: str


@dataclass(frozen=True)
class _Turn:
    """The content of one assistant turn lies from `start` to `end`; its end token from `stop` on."""

    start: int
    end: int
    stop: int


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"


class ChatTemplate:
    """The chat template of one checkpoint's processor."""

    def __init__(self, processor: Any, loss_scale: LossScale = "default") -> None:
        self._processor = processor
        self._trained, *others = loss_scale.split("+")
        self._ignores_empty_thoughts = "ignore_empty_think" in (self._trained, *others)
        self._reserved = re.compile("|".join(map(re.escape, sorted(reserved_tokens(processor), key=len, reverse=True))))

    def sft(self, row: Row) -> Rendered:
        """The conversation, with what `loss_scale` and the messages' `loss` say trained.

        Raises:
            DataError: the row does not suit `sft`, holds a special token in its text, or the template cannot render it.
        """
        self._check_sft(row)
        text = self._render(map(_as_dict, row.messages), row.tools)
        turns = self._marked_turns(row, text) or self._structural_turns(row, text)
        weights_C = np.full(len(text), 1.0 if self._trained == "all" else np.nan)
        for message, turn, scaled in zip(_assistants(row), turns, self._scaled(row), strict=True):
            weight = message.weight if (scaled if message.loss is None else message.loss) else np.nan
            weights_C[turn.start : turn.end] = weights_C[turn.stop : turn.stop + len(self._layout.end)] = weight
        if self._ignores_empty_thoughts:
            for found in _EMPTY_THOUGHTS.finditer(text):
                weights_C[found.start() : found.end()] = np.nan
        return Rendered(text, _spans(weights_C))

    def _scaled(self, row: Row) -> Iterator[bool]:
        """Whether each assistant turn is trained by `loss_scale` alone."""
        last_user = max((index for index, message in enumerate(row.messages) if message.role == "user"), default=-1)
        for index, message in enumerate(row.messages):
            if message.role == "assistant":
                yield index > last_user or self._trained != "last_round"

    def pt(self, row: Row) -> Rendered:
        """The row's texts, one after the other, and one end-of-text token; all trained but messages whose `loss` is false.

        Raises:
            DataError: the row has tools, reasoning_content, or a special token in its text.
        """
        self._check_reserved(row)
        if row.tools or any(message.tool_calls or message.reasoning_content for message in row.messages):
            raise DataError("the row has tools, tool_calls or reasoning_content: pt reads contents alone; write them as text")
        text, spans = "", []
        for message in row.messages:
            for part in message.parts:
                piece = part.text if isinstance(part, TextPart) else self._placeholder(part)
                if isinstance(part, TextPart) and message.loss is not False:
                    spans.append(Span(len(text), len(text) + len(piece), message.weight))
                text += piece
        ended = text + _end_of_text(self._processor.tokenizer)
        return Rendered(ended, _joined([*spans, Span(len(text), len(ended), 1.0)]))

    def _render(self, messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), **options: Any) -> str:
        try:
            return self._processor.apply_chat_template(list(messages), tools=list(tools) or None, tokenize=False, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"the checkpoint's chat template cannot render the conversation: {error}") from None

    def _check_sft(self, row: Row) -> None:
        if row.messages[0].role == TEXT_ROLE:
            raise DataError("the row is a text: sft needs messages (train on texts with `swiftcp pt`)")
        if row.messages[-1].role != "assistant":
            raise DataError(f"the conversation ends with the role {row.messages[-1].role}: sft needs an assistant message at the end")
        for position, message in enumerate(row.messages, start=1):
            if message.role != "assistant" and (message.loss or message.weight != 1.0):
                raise DataError(f"message {position} of role {message.role} has loss or weight: only assistant messages are trained in sft")
        self._check_reserved(row)

    def _check_reserved(self, row: Row) -> None:
        """Special tokens in a text would become placeholders or end turns."""
        texts = [(f"message {position}", text) for position, message in enumerate(row.messages, start=1) for text in _texts(message)]
        for place, text in [*texts, ("tools", json.dumps(row.tools, ensure_ascii=False))]:
            if found := self._reserved.search(text):
                raise DataError(f"{place} holds the special token {found[0]} in its text {shown(text)}: remove it, or write it differently")

    def _marked_turns(self, row: Row, text: str) -> list[_Turn] | None:
        """The turns by marks around contents; None where the template does not leave contents as they are."""
        if "\ue000" in text or any(message.reasoning_content for message in row.messages):
            return None
        marked, number = [], 0
        for message in row.messages:
            marked.append(_as_dict(message, (_mark(number), _mark(number + 1)) if message.role == "assistant" else ("", "")))
            number += 2 * (message.role == "assistant")
        pieces = _MARK.split(self._render(marked, row.tools))
        if "".join(pieces[::2]) != text or pieces[1::2] != [str(i) for i in range(number)]:
            return None
        bounds = [sum(map(len, pieces[: 2 * i + 1 : 2])) for i in range(number)]
        return [
            self._turn(text, start, None if message.tool_calls else end)
            for message, start, end in zip(_assistants(row), bounds[::2], bounds[1::2], strict=True)
        ]

    def _structural_turns(self, row: Row, text: str) -> list[_Turn]:
        """The turns by headers and end tokens. See the module's docstring."""
        assistants = _assistants(row)
        starts = [found.end() for found in re.finditer(re.escape(self._layout.header), text)]
        if not self._reserved.search(self._layout.header) or len(starts) != len(assistants):
            raise DataError("the checkpoint's chat template rewrites assistant turns so that they cannot be found in its output")
        turns = []
        for message, start, prefix in zip(assistants, starts, self._empty_prefixes(row, text), strict=True):
            own = (message.reasoning_content or message.text).lstrip()
            ours = prefix and text.startswith(prefix, start) and not own.startswith(prefix.strip())
            turns.append(self._turn(text, start + len(prefix) * bool(ours), None))
        return turns

    def _empty_prefixes(self, row: Row, text: str) -> Iterator[str]:
        """What the template writes between an assistant's header and a content of which it knows nothing, turn by turn."""
        mark = next(mark for mark in map(_mark, itertools.count()) if mark not in text)
        unknown = {"role": "assistant", "content": mark}
        dicts = [unknown if message.role == "assistant" else _as_dict(message) for message in row.messages]
        for piece in self._render(dicts, row.tools).split(mark)[:-1]:
            yield piece.rpartition(self._layout.header)[2]

    def _turn(self, text: str, start: int, end: int | None) -> _Turn:
        """A turn whose content begins at `start`; it ends at `end`, or where the end token begins."""
        stop = text.find(self._layout.end, start if end is None else end)
        if stop < 0:
            raise DataError(f"the checkpoint's chat template writes no {self._layout.end} behind an assistant turn")
        header_end = text.rfind(self._layout.header, 0, start) + len(self._layout.header)
        if text.startswith(self._layout.supplied, header_end):
            start = max(start, header_end + len(self._layout.supplied))
        return _Turn(start, max(start, stop if end is None else end), stop)

    @cached_property
    def _layout(self) -> _Layout:
        """Learnt from a conversation of two turns, each message a mark."""
        messages = [{"role": role, "content": _mark(number)} for number, role in enumerate(["user", "assistant"] * 2)]
        pieces = _MARK.split(self._render(messages))
        question = self._render(messages[:1])
        prompt = self._render(messages[:1], add_generation_prompt=True).removeprefix(question)
        user_end = question.partition(_mark(0))[2]
        if pieces[1::2] != ["0", "1", "2", "3"]:
            raise DataError("the checkpoint's chat template does not write each message once")
        header = _common_prefix(prompt, pieces[2].removeprefix(user_end), pieces[6].removeprefix(user_end))
        end = self._reserved.search(pieces[4])
        if end is None:
            raise DataError("the checkpoint's chat template ends assistant turns with no special token")
        return _Layout(header, prompt[len(header) :], end[0])

    def _placeholder(self, part: MediaPart) -> str:
        """A medium as the template writes it, with its markers."""
        return self._placeholders[part.kind]

    @cached_property
    def _placeholders(self) -> dict[str, str]:
        def written(kind: str) -> str:
            mark = {"type": "text", "text": _mark(0)}
            return self._render([{"role": "user", "content": [mark, {"type": kind}, mark]}]).split(_mark(0))[1]

        return {kind: written(kind) for kind in KINDS if hasattr(self._processor, f"{kind}_token")}


def reserved_tokens(processor: Any) -> set[str]:
    """Special tokens with a meaning for media, turns or texts: those of processor and tokenizer, and those that the template names."""
    tokenizer = processor.tokenizer
    template = processor.chat_template
    template = template if isinstance(template, str) else json.dumps(template or "")
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    media = {value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)}
    ends = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, _end_of_text(tokenizer)} - {None}
    return media | ends | {token for token in special if token in template}


def _end_of_text(tokenizer: Any) -> str:
    """<|endoftext|> where the vocabulary has it, for the tokenizers of chat models name the end of a turn as their eos_token."""
    return next((str(token) for token in tokenizer.added_tokens_decoder.values() if str(token) == "<|endoftext|>"), tokenizer.eos_token)


def _common_prefix(*texts: str) -> str:
    length = next((i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1), min(map(len, texts)))
    return texts[0][:length]


def _assistants(row: Row) -> list[Message]:
    return [message for message in row.messages if message.role == "assistant"]


def _texts(message: Message) -> Iterator[str]:
    """Everything in a message that the template may write."""
    yield from (part.text for part in message.parts if isinstance(part, TextPart))
    yield message.reasoning_content or ""
    yield json.dumps(message.tool_calls, ensure_ascii=False)


def _as_dict(message: Message, around: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """A message as templates expect it; `around` is written before and behind its content."""
    parts = [*([TextPart(around[0])] if around[0] else []), *message.parts, *([TextPart(around[1])] if around[1] else [])]
    content: str | list[dict[str, Any]]
    if all(isinstance(part, TextPart) for part in message.parts) and len(message.parts) <= 1:
        content = "".join(part.text for part in parts if isinstance(part, TextPart))
    else:
        content = [_part_as_dict(part) for part in parts]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = list(message.tool_calls)
    return fields


def _part_as_dict(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": part.kind}


def _spans(weights_C: np.ndarray) -> tuple[Span, ...]:
    """Runs of characters of one weight; NaN is not trained."""
    keys_C = np.where(np.isnan(weights_C), -1.0, weights_C)
    borders = [0, *(np.flatnonzero(np.diff(keys_C)) + 1).tolist(), len(keys_C)]
    return tuple(Span(start, end, float(keys_C[start])) for start, end in itertools.pairwise(borders) if end > start and keys_C[start] >= 0)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours of equal weight become one, so that a token across their border is trained; empty ones go."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.start and joined[-1].weight == span.weight:
            span = Span(joined.pop().start, span.end, span.weight)
        if span.end > span.start:
            joined.append(span)
    return tuple(joined)
