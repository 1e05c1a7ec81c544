"""Reads a command line of `[RECIPE.yaml] --key value ...`; which keys take lists comes from the config models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from swiftcp.config.keys import Key
from swiftcp.config.names import ALIASES, normalize
from swiftcp.config.recipe import parse_list
from swiftcp.config.resolved import Given, Origin, RawValue
from swiftcp.errors import ConfigError

_NEGATIVE_NUMBER = re.compile(r"-\.?\d")


def _is_option(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not _NEGATIVE_NUMBER.match(token)


def _num_values(tokens: Sequence[str], key: Key | None) -> int:
    """How many of the tokens behind an option belong to it: one, or for a list all up to the next option."""
    end = next((i for i, token in enumerate(tokens) if _is_option(token)), len(tokens))
    return end if key is not None and key.is_list else min(end, 1)


def _raw_value(values: Sequence[str], option: str, key: Key | None) -> RawValue:
    if not values:
        if key is not None and key.type is bool:
            return "true"
        raise ConfigError(f"command line: {option} has no value: write {option} {key.metavar if key else 'VALUE'}")
    if key is not None and key.is_list:
        return parse_list(values[0], f"command line: {option}") if len(values) == 1 and values[0].startswith("[") else list(values)
    return None if values[0] == "null" and key is not None and key.optional else values[0]


def parse_arguments(arguments: Sequence[str], keys: Mapping[str, Key]) -> tuple[Path | None, list[Given]]:
    """The recipe, if one is named, and the values given, under the names that the user wrote.

    Raises:
        ConfigError: an option without a value, or a value without an option.
    """
    recipe: Path | None = None
    given: list[Given] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not _is_option(token):
            if recipe is not None:
                raise ConfigError(f"command line: '{token}' belongs to no option (the recipe is {recipe}): write --key value")
            recipe = Path(token)
            continue
        option, equals, text = token.partition("=")
        name = normalize(option)
        key = keys.get(ALIASES.get(name, name))
        num_values = 0 if equals else _num_values(rest, key)
        values = [text] if equals else rest[:num_values]
        del rest[:num_values]
        given.append(Given(option, _raw_value(values, option, key), Origin("command line", option)))
    return recipe, given
