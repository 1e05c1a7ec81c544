"""The formats of rows that are recognised, each turned into a list of raw messages with `role` and `content`.

| format | columns |
| --- | --- |
| messages | `messages`: role, content |
| ShareGPT | `conversations`: from, value (or role, content) |
| Alpaca | `instruction`, `input` (optional), `output`, `history` (optional) |
| query and response | `query`, `response`, `history` (optional) |
| text | `text`, for pre-training; it gives way to any of the others |

Each but the last may have a `system` column; empty, it counts as absent, as other tools do. Two conversations in one row are an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swiftcp.errors import DataError

_REQUIRED = {
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
    "query and response": ("query", "response"),
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def to_messages(raw: Mapping[str, Any]) -> list[Any]:
    """The raw messages of a row of any known format; messages that are no objects are left for the caller to refuse.

    Raises:
        DataError: the row is in none of the formats, or in several.
    """
    found = [name for name, columns in _REQUIRED.items() if all(raw.get(column) is not None for column in columns)]
    if len(found) > 1:
        raise DataError(f"the row reads as {' and as '.join(found)}: keep the columns of one format")
    if not found:
        if raw.get("text") is not None:
            if raw.get("system"):
                raise DataError("the row has text and system: a text has no system message; remove the column, or write messages")
            return [{"role": "text", "content": raw["text"]}]
        raise DataError(
            f"the row has the columns {', '.join(raw) or '(none)'}: expected messages, conversations, instruction and output, "
            "query and response, or text"
        )
    messages = _CONVERTERS[found[0]](raw)
    return _with_system(messages, raw.get("system"))


def _with_system(messages: list[Any], system: Any) -> list[Any]:
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise DataError(f"system is {type(system).__name__} {system!r}: it must be a string")
    return [{"role": "system", "content": system}, *messages]


def _listed(raw: Mapping[str, Any], column: str) -> list[Any]:
    """A column that holds a list, or that list as a JSON string."""
    value = raw.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{column} is a string, but no JSON: {error}") from None
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise DataError(f"{column} is {type(value).__name__} {value!r}: it must be a list")
    return list(value)


def _from_messages(raw: Mapping[str, Any]) -> list[Any]:
    return [_message(item) for item in _listed(raw, "messages")]


def _from_sharegpt(raw: Mapping[str, Any]) -> list[Any]:
    return [_message(item) for item in _listed(raw, "conversations")]


def _message(item: Any) -> Any:
    """Keys `from` and `value` become `role` and `content`; other keys stay."""
    if not isinstance(item, Mapping) or "from" not in item:
        return item
    fields = {key: value for key, value in item.items() if key not in ("from", "value")}
    speaker = item["from"]
    role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if speaker == "function_call":
        calls = item.get("value")
        calls = calls if isinstance(calls, str) and calls.lstrip().startswith("[") else _as_list(calls)
        return {**fields, "role": role, "content": None, "tool_calls": calls}
    return {**fields, "role": role, "content": item.get("value")}


def _as_list(call: Any) -> Any:
    """One call, or one call as a JSON string, as what `tool_calls` expects."""
    return f"[{call}]" if isinstance(call, str) else call if isinstance(call, list) else [call]


def _turns(raw: Mapping[str, Any], question: Any, answer: Any) -> list[Any]:
    messages = []
    for position, pair in enumerate(_listed(raw, "history"), start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"history {position} is {pair!r}: it must be a pair of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _from_alpaca(raw: Mapping[str, Any]) -> list[Any]:
    texts = [raw["instruction"]] if raw.get("input") in (None, "") else [raw["instruction"], raw["input"]]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"instruction and input are {texts!r}: they must be strings")
    return _turns(raw, "\n".join(texts), raw["output"])


def _from_query(raw: Mapping[str, Any]) -> list[Any]:
    return _turns(raw, raw["query"], raw["response"])


_CONVERTERS = {
    "messages": _from_messages,
    "ShareGPT": _from_sharegpt,
    "Alpaca": _from_alpaca,
    "query and response": _from_query,
}
