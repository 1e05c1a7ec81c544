"""The formats of rows that are recognised, each turned into a list of raw messages with `role` and `content`.

| format | columns |
| --- | --- |
| messages | `messages`: role, content |
| ShareGPT | `conversations`: from, value (or role, content) |
| Alpaca | `instruction`, `input` (optional), `output`, `history` (optional) |
| query and response | `query`, `response`, `history` (optional) |
| prompt and completion | `prompt`, `completion`: texts, or lists of messages; of such a prompt nothing is trained |
| text | `text`, for pre-training; it gives way to any of the others |

Each but the last may have a `system` column; empty, it counts as absent, as other tools do. Two conversations in one row are an error.
Rows of preferences (a chosen and a rejected answer, or a completion with a label) are refused by that name.
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
    "prompt and completion": ("prompt", "completion"),
}
_PREFERENCES = ("rejected", "rejected_response", "rejected_messages", "rejected_images")
"""Columns that only rows of preferences have."""
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
_OTHER_ROLES = {"developer": "system", "tool_response": "tool"}
"""Names of roles in messages that mean one of ours."""
_CALLS = ("function_call", "tool_call")
"""Roles of messages that are one call of a tool, as JSON."""


def to_messages(raw: Mapping[str, Any]) -> list[Any]:
    """The raw messages of a row of any known format; messages that are no objects are left for the caller to refuse.

    Raises:
        DataError: the row is in none of the formats, or in several.
    """
    _refuse_preferences(raw)
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
            "query and response, prompt and completion, or text"
        )
    messages = _CONVERTERS[found[0]](raw)
    return _with_system(messages, raw.get("system"))


def _refuse_preferences(raw: Mapping[str, Any]) -> None:
    """Raises: DataError: the row holds answers to choose between, of which training on one alone would be a guess."""
    given = [column for column in _PREFERENCES if raw.get(column) is not None]
    if "label" in raw and isinstance(raw["label"], bool) and raw.get("completion") is not None:
        given.append("label")
    if given:
        raise DataError(
            f"the row is one of preferences (it has {', '.join(given)}), for DPO and the like, which are not supported: "
            "keep the answer to train on, as messages or response, and remove the others"
        )


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
    return _joined_calls([_message(item) for item in _listed(raw, "messages")])


def _from_sharegpt(raw: Mapping[str, Any]) -> list[Any]:
    return _joined_calls([_message(item) for item in _listed(raw, "conversations")])


def _message(item: Any) -> Any:
    """Keys `from` and `value` become `role` and `content`, and roles of other tools ours; other keys stay."""
    if not isinstance(item, Mapping):
        return item
    role_key, content_key, roles = ("from", "value", _SHAREGPT_ROLES) if "from" in item else ("role", "content", {})
    role, content = item.get(role_key), item.get(content_key)
    if not isinstance(role, str):
        return {**item, "role": role}
    fields = {key: value for key, value in item.items() if key not in (role_key, content_key)}
    if role in _CALLS:
        calls = content if isinstance(content, str) and content.lstrip().startswith("[") else _as_list(content)
        return {**fields, "role": role, "content": None, "tool_calls": calls}
    return {**fields, "role": (roles | _OTHER_ROLES).get(role, role), "content": content}


def _joined_calls(messages: list[Any]) -> list[Any]:
    """Calls become part of the assistant's turn in which they are made: of a message right before them, or of one of their own."""
    joined: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in _CALLS:
            joined.append(message)
            continue
        calls = _listed(message, "tool_calls")
        before = joined[-1] if joined and isinstance(joined[-1], Mapping) and joined[-1].get("role") == "assistant" else None
        if before is None:
            joined.append({**message, "role": "assistant", "tool_calls": calls})
        else:
            joined[-1] = {**before, "tool_calls": [*_listed(before, "tool_calls"), *calls]}
    return joined


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


def _from_prompt(raw: Mapping[str, Any]) -> list[Any]:
    prompt, completion = raw["prompt"], raw["completion"]
    if not isinstance(prompt, list | tuple) or not isinstance(completion, list | tuple):
        return _turns({}, prompt, completion)
    untrained = [
        {"loss": False, **message} if isinstance(message, Mapping) and message.get("role") == "assistant" else message for message in prompt
    ]
    return _joined_calls([_message(item) for item in (*untrained, *completion)])


_CONVERTERS = {
    "messages": _from_messages,
    "ShareGPT": _from_sharegpt,
    "Alpaca": _from_alpaca,
    "query and response": _from_query,
    "prompt and completion": _from_prompt,
}
