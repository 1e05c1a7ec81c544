"""What the config models say about each key: help and parsing are both made from it, so that they cannot drift apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from swiftcp.config.concerns import Concern

_METAVARS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}


@dataclass(frozen=True)
class Key:
    """One key of a command."""

    name: str
    panel: str
    help: str
    type: Any
    """The declared type without None; of a list, the type of its items."""
    is_list: bool
    optional: bool
    required: bool
    default: object

    @property
    def metavar(self) -> str:
        text = "|".join(get_args(self.type)) if get_origin(self.type) is Literal else _METAVARS[self.type]
        return f"{text} ..." if self.is_list else text

    @property
    def default_text(self) -> str | None:
        """The default as a user would write it, None if the help text says it or there is none."""
        if self.required or self.default is None or self.default == []:
            return None
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"


def _unwrap(annotation: Any) -> tuple[Any, bool, bool]:
    """The type inside `list[...]`, `... | None` and `Annotated[...]`, whether it is a list, whether it may be None."""
    is_list = optional = False
    while (origin := get_origin(annotation)) is not None and origin is not Literal:
        arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
        optional |= origin in (Union, UnionType)
        is_list |= origin is list
        annotation = arguments[0]
    return annotation, is_list, optional


def _key(name: str, field: FieldInfo, panel: str) -> Key:
    item_type, is_list, optional = _unwrap(field.annotation)
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    return Key(name, panel, field.description or "", item_type, is_list, optional, field.is_required(), default)


def _concerns(config_class: type[Concern]) -> Iterable[type[Concern]]:
    return [base for base in config_class.__mro__ if issubclass(base, Concern) and "panel" in vars(base) and base is not Concern]


@cache
def keys_of(config_class: type[Concern]) -> dict[str, Key]:
    """The keys of a command by name, grouped by concern in the order of its bases."""
    return {
        name: _key(name, config_class.model_fields[name], concern.panel)
        for concern in _concerns(config_class)
        for name in concern.__annotations__
        if name in config_class.model_fields
    }
