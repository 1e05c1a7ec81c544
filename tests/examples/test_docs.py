"""What the documents show works: links, commands, recipes and rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from swiftcp.config import TrainConfig
from swiftcp.config.keys import keys_of
from swiftcp.data.rows import parse_row

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def _texts() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        yield document.name, document.read_text(encoding="utf-8")


def _blocks(language: str) -> list[tuple[str, str]]:
    return [(name, block) for name, text in _texts() for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    names = re.findall(r"(?:swiftcp|tests|examples|scripts|docs)/[\w./-]*\w/?", text)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_architecture_is_that_of_the_package() -> None:
    table = dict(
        re.findall(r"^\| (`swiftcp/.*?) \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = {name for modules in table for name in re.findall(r"`swiftcp/([^`]+)`", modules)}
    there = {
        path.name + "/" * path.is_dir() for path in (ROOT / "swiftcp").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == there - {"__init__.py"}
    for modules, what in table.items():
        folders = [ROOT / name for name in re.findall(r"`(swiftcp/\w+/)`", modules)]
        names = re.findall(r"`(\w+(?:\.py|/))`", what)
        assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_readme_commands_are_those_of_ci() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (python3 -m pip install uv && .*)$", readme, re.MULTILINE)
    assert commands == [
        "python3 -m pip install uv && python3 -m uv run examples/quickstart/run.py",
        'python3 -m pip install uv && python3 -m uv run pytest -m "not slow and not gpu"',
    ]
    assert 'check pytest -m "not slow and not gpu"' in (ROOT / "scripts" / "check").read_text(encoding="utf-8")
    assert "scripts/check" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_recipes_have_known_keys() -> None:
    blocks = _blocks("yaml")
    assert any(name == "README.md" for name, _ in blocks)
    for name, block in blocks:
        assert set(YAML(typ="safe").load(block)) <= set(keys_of(TrainConfig)), name


def test_options_are_known() -> None:
    known = {f"--{key}" for key in keys_of(TrainConfig)} | {"--help"}
    for name, text in _texts():
        commands = re.findall(r"swiftcp (?:sft|pt|logprobs|parity)[^\n`]*", text)
        assert {option for command in commands for option in re.findall(r"--[a-z_]+", command)} <= known, name


def test_rows_are_read() -> None:
    blocks = _blocks("json") + [
        ("README.md", line) for line in re.findall(r'^    (\{"messages".*)$', dict(_texts())["README.md"], re.MULTILINE)
    ]
    assert len(blocks) >= 3
    for name, block in blocks:
        row = parse_row(json.loads(block), Path(name), 1)
        assert row.images or row.videos or row.audios
