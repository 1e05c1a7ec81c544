"""Configurations of the public models, for random weights at real sizes: benchmarks and tests."""

from __future__ import annotations

from pathlib import Path

from swiftcp.errors import ConfigError


def shape_names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def shape_file(name: str) -> Path:
    """The config.json of one public model.

    Raises:
        ConfigError: names the shapes there are.
    """
    if name not in shape_names():
        raise ConfigError(f"shape {name!r} is not known: use one of {', '.join(shape_names())}")
    return Path(__file__).parent / f"{name}.json"


def find_shape(name_or_path: str) -> Path:
    """The config.json of a public model by name, or the one that a path leads to.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    return shape_file(name_or_path)
