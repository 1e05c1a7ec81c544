"""Values of raw rows: how errors show them, JSON in strings, and text that is none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from swiftcp.errors import DataError


def check_text(value: Any) -> None:
    """Raises: DataError: a string holds half of a surrogate pair, as an emoji that was cut in two does; it is no text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(value[error.start]):04X}"
            raise DataError(f"a text holds the lone surrogate {code} at character {error.start + 1}: mend or remove it") from None
    elif isinstance(value, Mapping):
        for item in itertools.chain(value.keys(), value.values()):
            check_text(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_text(item)


def shown(value: Any) -> str:
    """A value as errors show it: its type and the beginning of its text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def parse_json(text: str, what: str) -> Any:
    """A column that holds JSON as a string.

    Raises:
        DataError: it is no JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{what} is {shown(text)}, which is no JSON: {error}") from None
