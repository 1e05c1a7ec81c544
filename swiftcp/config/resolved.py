"""Values and where each came from: one that a user gave, and the configuration that all of them make up."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from swiftcp.config.concerns import Concern
from swiftcp.config.keys import Key, keys_of
from swiftcp.config.secrets import mask

Level = Literal["command line", "python", "environment", "recipe", "default"]
RawValue = object
"""Text as the user wrote it, a list of such texts, or None; from Python any value."""


@dataclass(frozen=True)
class Origin:
    """The level that a value was taken from, and the place on it."""

    level: Level
    place: str = ""
    """`train.yaml:3`, a variable's name, or why a default is what it is."""

    def __str__(self) -> str:
        if not self.place:
            return self.level
        return self.place if self.level == "recipe" else f"{self.level}: {self.place}"


@dataclass(frozen=True)
class Given:
    """One value that a user gave, under the name that they used."""

    name: str
    value: RawValue
    origin: Origin


def _mask_all(value: object) -> object:
    if isinstance(value, list):
        return [_mask_all(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_text(item) for item in value) or "-"
    return str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)


@dataclass(frozen=True)
class ResolvedConfig[C: Concern]:
    """What a command runs with; picklable."""

    config: C
    origins: Mapping[str, Origin]
    """By key: where its value came from."""
    warnings: tuple[str, ...] = ()
    """What is allowed but probably not meant."""
    derived: tuple[str, ...] = ()
    """Lines about what follows from the values: layout, size of a step."""

    def with_defaults(self, values: Mapping[str, tuple[object, str]]) -> ResolvedConfig[C]:
        """Fill in defaults that depend on the model or machine; each comes with the reason for it."""
        config = self.config.model_copy(update={name: value for name, (value, _) in values.items()})
        origins = dict(self.origins) | {name: Origin("default", why) for name, (_, why) in values.items()}
        return replace(self, config=config, origins=origins)

    def _rows(self) -> Iterator[tuple[Key, object]]:
        for key in keys_of(type(self.config)).values():
            yield key, _mask_all(getattr(self.config, key.name))

    def describe(self) -> str:
        """What follows from the values, then each value with its origin, grouped as --help is; secrets masked."""
        rows = [(key.panel, key.name, _text(value), mask(str(self.origins[key.name]))) for key, value in self._rows()]
        name_width = max(len(name) for _, name, _, _ in rows)
        value_width = min(40, max(len(value) for _, _, value, _ in rows))
        lines = [*self.derived]
        for panel in dict.fromkeys(panel for panel, *_ in rows):
            lines.append(f"{panel}:")
            lines += [f"  {name:<{name_width}} = {value:<{value_width}}  [{origin}]" for p, name, value, origin in rows if p == panel]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def to_yaml(self) -> str:
        """A recipe with every value, each with its origin as a comment; secrets masked."""
        document = CommentedMap()
        for key, value in self._rows():
            document[key.name] = value
            document.yaml_add_eol_comment(mask(str(self.origins[key.name])).replace("\n", " "), key.name)
        yaml = YAML()
        yaml.width = 1000
        yaml.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null"))
        stream = io.StringIO()
        yaml.dump(document, stream)
        return stream.getvalue()
