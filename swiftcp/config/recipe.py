"""Reads recipes: flat YAML 1.2 mappings whose scalars stay text, to be coerced by the type that a key declares.

No value is built from YAML's own types, so that nothing depends on what YAML makes of `1e-5`, `010`, `12:30:00` or `no`, and no
tag can run code. Aliases cannot blow up, for values are scalars or lists of scalars.
"""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from swiftcp.config.paths import missing
from swiftcp.config.resolved import Given, Origin, RawValue
from swiftcp.errors import ConfigError

_MAX_BYTES = 1 << 20
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value"))


def _compose(text: str, name: str) -> Node | None:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: no valid YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError) as error:
        raise ConfigError(f"{name}: no valid YAML: {error}") from None


def _place(node: Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _scalar(node: Node, place: str) -> str | None:
    """Raises: ConfigError: the node is no scalar, or has a tag of its own, which could run code."""
    if node.tag not in _PLAIN_TAGS:
        shown = str(node.tag).replace(_TAG, "!!")
        raise ConfigError(f"{place}: the tag {shown} is not allowed: write a plain value")
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{place}: a list or mapping stands inside another value or key: write plain values")
    return None if node.tag == _TAG + "null" else node.value


def _value(node: Node, name: str) -> RawValue:
    """Text, None, a list of them, or, for a mapping, a dictionary of its keys: the caller knows what to say about those."""
    if isinstance(node, SequenceNode) and node.tag in _PLAIN_TAGS:
        return [_scalar(item, _place(item, name)) for item in node.value]
    if isinstance(node, MappingNode) and node.tag in _PLAIN_TAGS:
        return {str(key.value): None for key, _ in node.value}
    return _scalar(node, _place(node, name))


def parse_list(text: str, place: str) -> list[str | None]:
    """YAML list text from a command line: `[a.jsonl, b.jsonl]`.

    Raises:
        ConfigError: the text is no list of plain values.
    """
    node = _compose(text, place)
    if not isinstance(node, SequenceNode):
        raise ConfigError(f"{place}: '{text}' is no list: write [a, b], or the values one after the other")
    return [_scalar(item, place) for item in node.value]


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(missing("recipe", path))
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"recipe {path} has {path.stat().st_size} bytes: a recipe is a YAML file of at most {_MAX_BYTES}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is no UTF-8 text (byte {error.start}): save it as UTF-8") from None


def read_recipe(path: Path) -> list[Given]:
    """The values of a recipe, in its order, each with its file and line; a key that stands twice comes twice.

    Raises:
        ConfigError: no file, no YAML, no mapping, or a tag, with file and line.
    """
    name = str(path)
    node = _compose(_read_text(path), name)
    if node is None:
        return []
    if not isinstance(node, MappingNode):
        raise ConfigError(f"{_place(node, name)}: a recipe is a mapping: write 'key: value' lines")
    return [
        Given(str(_scalar(key, _place(key, name))), _value(value, name), Origin("recipe", _place(key, name))) for key, value in node.value
    ]
